"""A training run on disk: its paths, its progress and its result. Pure data, no torch.

One directory holds one run. Everything in it is written whole (beside, fsync, replace) or appended a line at a time, so
that a reader at any moment, after any kill, sees a consistent run.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import TrainingProgress
from tuner.system.disk_space import translate_full_disk
from tuner.system.files import write_atomically
from tuner.training.launching.checkpoint_files import newest_update


def decisive(recommendation: Recommendation, request: TrainingRequest) -> dict[str, object]:
    """Facts that must stay equal for a run to go on, as far as they are known before the data is read.

    The number of ranks, how they share the model and how gradients are gathered may change.
    """
    spec = recommendation.request.spec
    return {
        "spec": spec.model_dump(mode="json", exclude={"parallelism", "gradient_gathering"}),
        "effective batch size": recommendation.request.effective_batch_size,
        "seed": request.seed,
        "number of updates under a schedule": request.updates if spec.schedule.name != "constant" else None,
    }


@dataclass(frozen=True)
class RunPaths:
    """The files of one training run. Nothing else builds these names."""

    directory: Path

    @property
    def recommendation(self) -> Path:
        """The recommendation the run is made from (JSON)."""
        return self.directory / "recommendation.json"

    @property
    def request(self) -> Path:
        """The ``TrainingRequest`` (JSON)."""
        return self.directory / "training.json"

    @property
    def progress(self) -> Path:
        """The log of progress: one ``TrainingProgress`` a line."""
        return self.directory / "progress.jsonl"

    @property
    def result(self) -> Path:
        """The ``TrainingResult``; absent while the run goes on and after a kill."""
        return self.directory / "result.json"

    @property
    def log(self) -> Path:
        """Output of the training process."""
        return self.directory / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints and the pointer to the newest."""
        return self.directory / "checkpoints"

    @property
    def newest_checkpoint(self) -> Path:
        """Pointer to the newest checkpoint: its file and its update (JSON)."""
        return self.checkpoints / "newest.json"

    @property
    def weights(self) -> Path:
        """The trained weights, when the run succeeded."""
        return self.directory / "model.safetensors"

    @property
    def average_weights(self) -> Path:
        """The moving averages of the weights, when the spec requests them."""
        return self.directory / "model-average.safetensors"

    @property
    def tensorboard(self) -> Path:
        """Folder of the events for TensorBoard."""
        return self.directory / "tensorboard"

    @property
    def cache(self) -> Path:
        """Folder of the libraries' caches, removed with the run's folder."""
        return self.directory / "cache"

    def cache_variables(self) -> dict[str, str]:
        """The environment that has libraries keep copies of data and compiled code in the run's folder."""
        cache = self.cache.absolute()
        return {
            "HF_DATASETS_CACHE": str(cache / "datasets"),
            "HF_MODULES_CACHE": str(cache / "modules"),
            "MPLCONFIGDIR": str(cache / "matplotlib"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }

    @property
    def lowered(self) -> Path:
        """The bound on micro-batches after one did not fit that could not be divided on the spot (JSON)."""
        return self.directory / "largest-micro-batch.json"

    def bound(self) -> int | None:
        """Samples in the largest micro-batch that may still be tried; None when none has failed, or it is not known.

        A file that cannot be read costs time, not the run: a micro-batch that does not fit lowers the bound again.
        """
        try:
            return max(1, int(json.loads(self.lowered.read_bytes())["samples"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def lower_bound(self, samples: int) -> None:
        """Write the bound: go on with micro-batches of at most ``samples``."""
        write_atomically(self.lowered, json.dumps({"samples": samples}))

    def failure(self, rank: int) -> Path:
        """The ``TrainingResult`` of a rank that failed, where there are several."""
        return self.directory / f"failure-{rank}.json"

    @property
    def failures(self) -> list[Path]:
        """Results of the ranks that failed, in the order of failure."""
        return sorted(self.directory.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)

    def checkpointed_update(self) -> int | None:
        """The update of the newest checkpoint, from which a process will go on; None when there is none yet.

        Its files are not read: where they turn out to be damaged, the process goes on from an older checkpoint.
        """
        return newest_update(self.newest_checkpoint)


class ProgressLog:
    """The updates of a run in a file: appended by the training process, followed by the process that started it.

    Lines are dropped by replacing the file. A follower notices, and goes on where the new file parts from the old one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._passed: list[int] = []
        """Hash of every line that was passed."""
        self._read = 0
        """Bytes of these lines."""
        self._file: int | None = None
        """Inode of the file that they were read from."""

    def append(self, progress: TrainingProgress) -> None:
        """Append a line.

        Raises:
            StorageError: when the disk has no room for it.
        """
        line = progress.model_dump_json() + "\n"
        with translate_full_disk(self.path, len(line)), self.path.open("a") as stream:
            stream.write(line)

    def forget_after(self, update: int) -> None:
        """Drop the lines of updates after ``update``, which will be repeated, and a line that a kill cut short."""
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if 0 < _update_of(line) <= update]
        if kept != lines:
            write_atomically(self.path, "".join(line + "\n" for line in kept))

    def skip_to_end(self) -> None:
        """Let ``new_lines`` begin with what is appended from now on."""
        self._new()

    def skip_past(self, update: int) -> None:
        """Let ``new_lines`` begin with the first one after ``update``."""
        self._passed, self._read = [], 0
        for line in self._lines():
            if _update_of(line) > update:
                return
            self._pass(line)

    def new_lines(self) -> list[TrainingProgress]:
        """Updates appended since the last call; a line that is still being written waits for the next call.

        Where lines were dropped, the updates that are repeated are reported again.
        """
        return [TrainingProgress.model_validate_json(line) for line in self._new()]

    def _new(self) -> list[bytes]:
        lines = self._lines()
        for line in lines:
            self._pass(line)
        return lines

    def _pass(self, line: bytes) -> None:
        self._passed.append(hash(line))
        self._read += len(line)

    def _lines(self) -> list[bytes]:
        """The complete lines that were not passed yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != self._file or status.st_size < self._read:
                self._file = status.st_ino
                self._go_back_to_common_lines(stream)
            stream.seek(self._read)
            return [line for line in stream if line.endswith(b"\n")]

    def _go_back_to_common_lines(self, stream: BinaryIO) -> None:
        """Pass only the lines that a replaced file has in common with the one before."""
        passed, self._passed, self._read = self._passed, [], 0
        for line, known in zip(stream, passed, strict=False):
            if hash(line) != known:
                return
            self._pass(line)

    def last_update(self) -> int:
        """The newest update logged; 0 when there is none."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return max(map(_update_of, lines), default=0)


def _update_of(line: str | bytes) -> int:
    """The update of a line; 0 for a line that a kill cut short."""
    try:
        return TrainingProgress.model_validate_json(line).update
    except ValidationError:
        return 0
