"""What others do, each in a process of its own: python benchmarks/finders_peers.py NAME REQUEST.json DIARY.

Started by finders.py with the allocator's settings that our probes have. The process imports what it needs, then sets
the budget that a probe of ours sets, and then lets the peer search as its users do: all trials in this one process. A
trial is two updates of two micro-batches: forward, backward, optimizer step, in plain torch. As in our probes, the
samples of a whole effective batch are in memory, and micro-batches are slices of them.

- accelerate: its decorator around a function that builds model and optimizer and trains, as its examples do.
- Lightning: `Tuner.scale_batch_size` with its defaults, of which `steps_per_trial=3` makes a trial three updates.
- NeMo's OOMptimizer, from its description: from 32 doubled or halved until the answer lies between a fit and a failure,
  then halved until the gap is below 5 %. One model for all trials.

accelerate and Lightning tell an out-of-memory error by their own code; NeMo's knows CUDA's alone: on a CPU ours helps.
"""

import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from finders_trials import Diary, Outcome
from torch import Tensor, nn

from batchwright.errors import OutOfMemoryError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TuningRequest
from batchwright.training.micro_batches.nested_batches import to_device
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.optimizers import build_optimizer
from batchwright.training.update_engine import autocast
from batchwright.workloads.base import Batch
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.preload import import_early, late_imports

UPDATES, MICRO_BATCHES = 2, 2
_DRAWN = 64
"""Samples that are drawn; the rest repeats them."""
Work = tuple[nn.Module, torch.optim.Optimizer]


class Training:
    """What every peer is given: a model to build, a loss, samples; and where trials are written down."""

    def __init__(self, request: TuningRequest, device: MemoryDevice, diary: Diary) -> None:
        self.spec = request.workload
        self.device = device
        self.diary = diary
        self._workload = build_workload(request.workload)
        drawn = self._workload.make_batch(_DRAWN)
        self._samples = sliced(_repeated(drawn, -(-request.effective_batch_size // _DRAWN)))

    def build(self) -> Work:
        """A new model on the device, and its optimizer."""
        model = build_model(self.spec, self._workload).to(self.device.torch_device)
        return model, build_optimizer(self.spec.optimizer, model)

    def samples(self, size: int) -> Batch:
        """The first ``size`` samples: views, but where there are not as many."""
        if size > self._samples.size:
            return _repeated(self._samples.batch, -(-size // self._samples.size))
        return self._samples.divide([size])[0].batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss, in the spec's precision."""
        with autocast(self.spec, self.device.torch_device):
            ((loss_sum, weight),) = self._workload.loss_terms(model, batch).values()
        return loss_sum / weight

    def updates(self, size: int, work: Work) -> None:
        """One trial, written down.

        Raises:
            RuntimeError: what torch raised, as it was.
        """
        began = time.monotonic()
        failed: Outcome | None = "error"
        try:
            self._updates(size, *work)
            failed = None
        except Exception as error:
            failed = "oom" if isinstance(self.device.translate(error), OutOfMemoryError) else "error"
            raise
        finally:
            self.diary.tried(size, failed or "fit", time.monotonic() - began)

    def _updates(self, size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(UPDATES):
            for _ in range(MICRO_BATCHES):
                batch = to_device(self.samples(size), self.device.torch_device)
                torch.autograd.backward(self.loss(model, batch) / MICRO_BATCHES)
            optimizer.step()
            optimizer.zero_grad()
        self.device.synchronize()


def _repeated(batch: Batch, times: int) -> Batch:
    """Every tensor of a dict, repeated along its samples."""
    return {name: torch.cat([tensor] * times) for name, tensor in batch.items()}


def accelerate(training: Training, start: int) -> int:
    """``find_executable_batch_size``."""
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - one framework per process

    def train(batch_size: int) -> int:
        training.updates(batch_size, training.build())
        return batch_size

    answer: int = find_executable_batch_size(train, starting_batch_size=start)()
    return answer


def plain(training: Training, size: int) -> int:
    """No search: one trial, in a process that has seen no other."""
    training.updates(size, training.build())
    return size


def nemo(training: Training) -> int:
    """The OOMptimizer's search."""
    work = training.build()
    size, fitting, failing = 32, 0, 0
    while size:
        if _fits(training, size, work):
            fitting = size
        else:
            failing = size
            if (failing - fitting) / failing < 0.05:
                break
        size = round((fitting + failing) / 2) if fitting and failing else 2 * fitting or failing // 2
        if size in (fitting, failing):
            break
    return fitting


def _fits(training: Training, size: int, work: Work) -> bool:
    failure: Exception | None = None
    try:
        training.updates(size, work)
    except RuntimeError as error:
        failure = error
    if failure is None:
        return True
    if not isinstance(training.device.translate(failure), OutOfMemoryError):
        raise failure
    del failure
    work[1].zero_grad()
    training.device.release()
    return False


def lightning(training: Training, mode: str) -> int:
    """``Tuner.scale_batch_size``."""
    from lightning.pytorch.tuner import Tuner  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - as above

    trials = _LightningTrials(training)
    module = _lightning_module(training, trials)
    with tempfile.TemporaryDirectory() as directory:
        tuner = Tuner(_lightning_trainer(training.device.torch_device, directory))
        try:
            answer = tuner.scale_batch_size(module, mode=mode)
        except Exception as error:
            trials.end("oom" if isinstance(training.device.translate(error), OutOfMemoryError) else "error")
            raise
    trials.end("oom")
    assert answer is not None
    return int(answer)


class _LightningTrials:
    """Lightning's trials, told by its hooks: one that does not end before the next begins ran out of memory."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._open: tuple[int, float] | None = None

    def begin(self, size: int) -> None:
        self.end("oom")
        self._open = size, time.monotonic()

    def end(self, outcome: Outcome) -> None:
        """The open trial, if there is one, has ended so."""
        if self._open is not None:
            size, began = self._open
            self._training.diary.tried(size, outcome, time.monotonic() - began)
        self._open = None


class _Slices(torch.utils.data.IterableDataset[Batch]):
    """The same micro-batch for ever."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(self._batch)


def _lightning_module(training: Training, trials: _LightningTrials) -> Any:  # noqa: ANN401 - untyped where it is not installed
    from lightning import LightningModule  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - as above

    class Module(LightningModule):  # type: ignore[misc,unused-ignore] # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model, self.updating = training.build()

        def training_step(self, batch: Batch, _index: int) -> Tensor:
            return training.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.updating

        def train_dataloader(self) -> torch.utils.data.DataLoader[Batch]:
            return torch.utils.data.DataLoader(_Slices(training.samples(self.batch_size)), batch_size=None)

        def on_train_start(self) -> None:
            trials.begin(self.batch_size)

        def on_train_end(self) -> None:
            trials.end("fit")

    return Module()


def _lightning_trainer(device: torch.device, directory: str) -> Any:  # noqa: ANN401 - as above
    from lightning import Trainer  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - as above

    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=-1,
        accumulate_grad_batches=MICRO_BATCHES,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


PEERS: dict[str, Callable[[Training], int]] = {
    "accelerate (128)": lambda training: accelerate(training, 128),
    "accelerate (4096)": lambda training: accelerate(training, 4096),
    "Lightning power": lambda training: lightning(training, "power"),
    "Lightning binsearch": lambda training: lightning(training, "binsearch"),
    "NeMo OOMptimizer": nemo,
}
FRAMEWORKS = {
    "accelerate": ("accelerate.utils",),
    "Lightning": ("lightning", "lightning.pytorch.tuner", "lightning.pytorch.loggers.logger"),
    "NeMo": (),
    "plain": (),
}


def finder(name: str) -> Callable[[Training], int]:
    """A peer's search; ``plain 37`` tries 37 and nothing else."""
    if name.startswith("plain "):
        return lambda training: plain(training, int(name.split()[1]))
    return PEERS[name]


def main(name: str, request_path: Path, diary: Diary) -> None:
    """Set the budget, search, write down the answer."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    request = TuningRequest.model_validate_json(request_path.read_bytes())
    import_early((*late_imports(request.workload), *FRAMEWORKS[name.split(maxsplit=1)[0]]))
    device = open_device(request.device or "cpu")
    assert request.memory_limit_bytes is not None
    device.limit(request.memory_limit_bytes, request.memory_margin)
    failure: BaseException | None = None
    try:
        diary.answered(finder(name)(Training(request, device, diary)))
    except Exception as error:  # noqa: BLE001 - whatever ends a peer is what is reported of it
        failure = error
    if failure is not None:
        known = isinstance(device.translate(failure), OutOfMemoryError)  # type: ignore[arg-type]
        device.lift_limit()
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        diary.failed(f"did not know this for out of memory: {text}" if known else text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Diary(Path(sys.argv[3])))
