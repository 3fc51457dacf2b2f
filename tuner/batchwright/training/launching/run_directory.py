"""A training run on disk: its paths, its progress and its result. No torch.

One directory holds one run. Every file is replaced atomically or appended a line at a time, so that a reader sees a
consistent run at any moment, also after a kill.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingProgress
from batchwright.system.disk_space import translate_full_disk
from batchwright.system.files import PathBelow, write_atomically
from batchwright.training.launching.checkpoint_files import newest_update


def run_identity(recommendation: Recommendation, request: TrainingRequest) -> dict[str, object]:
    """The values that must stay equal for a run to resume, as far as they are known before the data is read.

    The number of ranks, the way they share the model and the way gradients are summed may change.
    """
    spec = recommendation.request.workload
    is_split = spec.evaluation is not None and spec.evaluation.is_split  # which keeps samples from training
    evaluation: Any = set(EvaluationSpec.model_fields) - {"fraction", "count", "seed"} if is_split else True
    excluded = {"parallelism": True, "gradient_gathering": True, "evaluation": evaluation}
    return {
        "spec": spec.model_dump(mode="json", exclude=excluded),
        "effective batch size": recommendation.request.effective_batch_size,
        "seed": request.seed,
        "number of updates under a schedule": request.updates if spec.schedule.name != "constant" else None,
    }


@dataclass(frozen=True)
class RunPaths:
    """The files of one training run. Nothing else builds these names."""

    directory: Path

    recommendation = PathBelow("recommendation.json")
    """The recommendation that the run was started from (JSON)."""
    request = PathBelow("training.json")
    """The ``TrainingRequest`` (JSON)."""
    progress = PathBelow("progress.jsonl")
    """The log of progress: one ``TrainingProgress`` per line."""
    result = PathBelow("result.json")
    """The ``TrainingResult``; absent during the run and after a kill."""
    log = PathBelow("log.txt")
    """Output of the training process."""
    checkpoints = PathBelow("checkpoints")
    """Folder of the checkpoints and the pointer to the newest."""
    newest_checkpoint = PathBelow("checkpoints/newest.json")
    """Pointer to the newest checkpoint: its folder and its update (JSON)."""
    weights = PathBelow("model.safetensors")
    """The trained weights, when the run succeeded."""
    average_weights = PathBelow("model-average.safetensors")
    """The moving averages of the weights, when the spec requests them."""
    pretrained = PathBelow("pretrained")
    """Folder of the trained transformers model, for ``from_pretrained``."""
    pretrained_average = PathBelow("pretrained-average")
    """Folder of the model with the moving averages of the weights."""
    best_weights = PathBelow("model-best.safetensors")
    """The weights of the best evaluation, when the run succeeded."""
    pretrained_best = PathBelow("pretrained-best")
    """Folder of the model with the weights of the best evaluation."""
    base = PathBelow("base")
    """Folder of the frozen model, when an adapter of random weights was trained."""
    tensorboard = PathBelow("tensorboard")
    """Folder of the events for TensorBoard."""
    mlflow = PathBelow("mlflow.db")
    """The database of MLflow, where no server was named."""
    tracked_runs = PathBelow("tracked-runs.json")
    """The ids of the run in trackers (JSON)."""
    cache = PathBelow("cache")
    """Folder of the libraries' caches, removed with the run's folder."""
    micro_batch_bound_file = PathBelow("largest-micro-batch.json")
    """The bound on micro-batches (JSON), written when one did not fit and could not be divided on the spot."""

    def cache_variables(self) -> dict[str, str]:
        """Environment variables that make libraries cache data and compiled code in the run's folder."""
        cache = self.cache.absolute()
        return {
            "HF_DATASETS_CACHE": str(cache / "datasets"),
            "HF_MODULES_CACHE": str(cache / "modules"),
            "MPLCONFIGDIR": str(cache / "matplotlib"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }

    def micro_batch_bound(self) -> int | None:
        """Samples in the largest micro-batch that may still be tried; None when none has failed, or it is not known.

        If the file cannot be read, only time is lost: a micro-batch that does not fit lowers the bound again.
        """
        try:
            return max(1, int(json.loads(self.micro_batch_bound_file.read_bytes())["samples"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_micro_batch_bound(self, samples: int) -> None:
        """Write the bound: the run resumes with micro-batches of at most ``samples``."""
        write_atomically(self.micro_batch_bound_file, json.dumps({"samples": samples}))

    def failure(self, rank: int) -> Path:
        """The ``TrainingResult`` of a rank that failed, if there are several ranks."""
        return self.directory / f"failure-{rank}.json"

    @property
    def failures(self) -> list[Path]:
        """Results of the ranks that failed, in the order of failure."""
        return sorted(self.directory.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)

    def checkpointed_update(self) -> int | None:
        """The update of the newest checkpoint, from which a process will resume; None when there is none yet.

        Its files are not read. If they are damaged, the process resumes from an older checkpoint.
        """
        return newest_update(self.newest_checkpoint)


class ProgressLog:
    """A file with the updates of a run, appended by the training process and read by the process that started it.

    Lines are dropped by replacing the file. A reader notices, and continues at the first line that differs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._consumed_hashes: list[int] = []
        """Hash of every line that was read."""
        self._consumed_bytes = 0
        """Bytes of the lines that were read."""
        self._inode: int | None = None
        """Inode of the file that the lines were read from."""
        self._newest: int | None = None
        """The newest update of the file, once a line was appended."""

    def append(self, progress: TrainingProgress) -> None:
        """Append a line, in place of those of this update and later ones.

        Raises:
            StorageError: when the disk is full.
        """
        if self._newest is None:
            self._newest = self.last_update()
        if progress.update <= self._newest:
            self.truncate_after(progress.update - 1)
        self._newest = progress.update
        line = progress.model_dump_json() + "\n"
        with translate_full_disk(self.path, len(line)), self.path.open("a") as stream:
            stream.write(line)

    def truncate_after(self, update: int) -> None:
        """Drop the lines of updates after ``update``, which will be repeated, and a line truncated by a kill."""
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if 0 < _update_of(line) <= update]
        if kept != lines:
            write_atomically(self.path, "".join(line + "\n" for line in kept))

    def skip_to_end(self) -> None:
        """Let ``new_lines`` begin with the lines appended from now on."""
        self._consume_new()

    def skip_to_update(self, update: int) -> None:
        """Let ``new_lines`` begin with the first update after ``update``."""
        self._consumed_hashes, self._consumed_bytes = [], 0
        for line in self._unread_lines():
            if _update_of(line) > update:
                return
            self._consume(line)

    def new_lines(self) -> list[TrainingProgress]:
        """Updates appended since the last call. An incomplete line is returned by a later call.

        After lines were dropped, the repeated updates are reported again.
        """
        return [TrainingProgress.model_validate_json(line) for line in self._consume_new()]

    def _consume_new(self) -> list[bytes]:
        lines = self._unread_lines()
        for line in lines:
            self._consume(line)
        return lines

    def _consume(self, line: bytes) -> None:
        self._consumed_hashes.append(hash(line))
        self._consumed_bytes += len(line)

    def _unread_lines(self) -> list[bytes]:
        """The complete lines that were not read yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != self._inode or status.st_size < self._consumed_bytes:
                self._inode = status.st_ino
                self._rewind_to_common_lines(stream)
            stream.seek(self._consumed_bytes)
            return [line for line in stream if line.endswith(b"\n")]

    def _rewind_to_common_lines(self, stream: BinaryIO) -> None:
        """Continue after the lines that a replaced file has in common with the one before."""
        consumed, self._consumed_hashes, self._consumed_bytes = self._consumed_hashes, [], 0
        for line, known in zip(stream, consumed, strict=False):
            if hash(line) != known:
                return
            self._consume(line)

    def last(self) -> TrainingProgress | None:
        """The newest line; None when there is none."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return TrainingProgress.model_validate_json(lines[-1]) if lines and _update_of(lines[-1]) else None

    def last_update(self) -> int:
        """The newest update logged; 0 when there is none."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return max(map(_update_of, lines), default=0)


def _update_of(line: str | bytes) -> int:
    """The update of a line; 0 for a line truncated by a kill."""
    try:
        return TrainingProgress.model_validate_json(line).update
    except ValidationError:
        return 0
