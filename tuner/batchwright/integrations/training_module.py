"""A LightningModule, its optimizer and samples of its data as a workload to probe.

They are written to a file, which every probe reads: the probe then holds the module once, as training does, and its
optimizer has the very parameters of its module. On the CPU the memory of Lightning does not count against the limit,
since ``batchwright.workloads.preload`` has this module imported before.
"""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from batchwright.errors import FieldProblem, SpecError
from batchwright.library.pickling import ModulePickler
from batchwright.library.process_state import restore_state, write_state
from batchwright.schemas.recommendation import Advice
from batchwright.system.files import atomic_writer
from batchwright.training.micro_batches.nested_batches import tensors_of
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import Batch, Loss, Sample

TARGET = "batchwright.integrations.training_module:TrainingModule"
"""The workload of a file, as a `python` model."""
_READ = 256
"""Samples of the data that are compared: enough to meet a long one, few enough to read within seconds."""
_KEPT = 64
"""Of these, the largest are kept and sent to the probes. They differ, so that a loss that couples them is found."""


def save(
    file: Path,
    module: LightningModule,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    collate: Callable[[list[Sample]], Batch],
) -> tuple[Advice, ...]:
    """Write what ``TrainingModule`` reads. Classes of a script or a notebook are written by value.

    Of the Trainer of the module, which is on the CPU, only the class and the schedulers of learning rates are written.

    Returns:
        warnings of what the module uses and probes cannot compare.

    Raises:
        StorageError: when the disk is full.
    """
    with atomic_writer(file) as opened:
        unknown = write_state(opened, (samples, collate), (module, optimizer))
        _SamplePickler(opened).dump((samples, collate))
        ModulePickler(opened).dump((module, optimizer, *_trainer_parts(module)))
    return unknown


def _trainer_parts(module: LightningModule) -> tuple[type[Trainer] | None, list[Any]]:
    """The class of a module's Trainer, of the package ``lightning`` or ``pytorch_lightning``, and its schedulers."""
    trainer = getattr(module, "_trainer", None)
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    return (kinds[-1], trainer.lr_scheduler_configs) if trainer is not None and kinds else (None, [])


class _SamplePickler(ModulePickler):
    """Writes of a sample that is a view of the whole data (``TensorDataset``) only its own elements."""

    def reducer_override(self, obj: object) -> object:
        """Copy a view."""
        if isinstance(obj, Tensor) and obj.untyped_storage().nbytes() > obj.nbytes:
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call] # of torch
        return super().reducer_override(obj)


class TrainingModule:
    """A ``batchwright.workloads.base.Workload`` of a module's ``training_step`` that builds its own optimizer.

    It reads the file that ``save`` wrote, which has to be there until the tuning has ended.
    """

    keeps_modes = True  # as Lightning does

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._optimizer: torch.optim.Optimizer | None = None
        self._trained: list[nn.Parameter] = []
        self._trainer: Trainer | None = None
        self._samples: list[Sample]
        self._collate: Callable[[list[Sample]], Batch]
        with self._file.open("rb") as opened:
            restore_state(opened)
            self._samples, self._collate = pickle.load(opened)  # noqa: S301 - written by the parent process
            self._module_at = opened.tell()
            self._read: Any = pickle.load(opened)  # noqa: S301 - as above

    def build_model(self) -> nn.Module:
        """Return the module that was read with the file, and then another copy at each call."""
        module: nn.Module
        if self._read is None:
            with self._file.open("rb") as opened:
                opened.seek(self._module_at)
                self._read = pickle.load(opened)  # noqa: S301 - written by the parent process
        (module, self._optimizer, trainer, schedulers), self._read = self._read, None
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if trainer is not None:
            self._trainer = trainer(accelerator="cpu", devices=1, barebones=True)
            self._trainer.strategy.optimizers = [self._optimizer]
            self._trainer.strategy.lr_scheduler_configs = schedulers
        return module

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer that was read with the module, of these parameters if an estimate has replaced them."""
        if self._optimizer is None:
            raise RuntimeError("the optimizer is read with the module, by build_model()")
        replaced = dict(zip(map(id, self._trained), parameters, strict=False))
        for group in self._optimizer.param_groups:
            group["params"] = [replaced.get(id(one), one) for one in group["params"]]
        return self._optimizer

    def make_batch(self, size: int) -> Batch:
        """Repeat the samples until there are ``size``."""
        return self._collate(list(islice(cycle(self._samples), size)))

    def make_micro_batch(self, size: int) -> MicroBatch:
        """Repeat the samples, and collate the samples of each part as the loader does."""
        return MicroBatch.collated(list(islice(cycle(self._samples), size)), self._collate)

    def loss_terms(self, model: Any, batch: Batch) -> Loss:  # noqa: ANN401 - a LightningModule, not typed
        """The loss of a training step, which is the mean over the samples.

        For the step alone, the model has a Trainer, which gives it its optimizer and schedulers, and logs nothing.
        """
        batch = model.on_after_batch_transfer(model.on_before_batch_transfer(batch, 0), 0)
        numbered = len(inspect.signature(model.training_step).parameters) > 1
        model.trainer = self._trainer
        try:
            output = model.training_step(batch, 0) if numbered else model.training_step(batch)
        finally:
            model.trainer = None
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss


def largest_samples(loader: DataLoader[Sample]) -> list[Sample]:
    """The largest of up to 256 samples of a loader's data, largest first.

    They are spread over the data. Of a stream they are the first, read from a copy: the fit reads all of the stream.

    Raises:
        SpecError: when a stream cannot be copied, such as one that holds a generator.
    """
    return sorted(
        _spread(loader.dataset),
        key=lambda sample: sum(tensor.numel() for tensor in tensors_of(sample)) + _listed(sample),
        reverse=True,
    )[:_KEPT]


def _spread(dataset: Any) -> Iterator[Sample]:  # noqa: ANN401 - sized or not
    if isinstance(dataset, IterableDataset):
        try:
            copied = copy.deepcopy(dataset)
        except Exception as error:
            message = (
                f"is a stream that cannot be copied ({type(error).__name__}: {error}), so that the samples that are "
                "read to find the largest would be missing from the fit: open its source in `__iter__`"
            )
            raise SpecError([FieldProblem("train_dataloader", message, type(dataset).__name__)], "data") from error
        yield from islice(copied, _READ)
        return
    length = len(dataset)
    count = min(length, _READ)
    for number in range(count):
        yield dataset[number * length // count]


def _listed(sample: Sample) -> int:
    """Numbers in the lists of a sample, which become tensors."""
    if isinstance(sample, Mapping):
        return sum(_listed(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(_listed(value) for value in sample)
    return 0 if isinstance(sample, Tensor) else int(getattr(sample, "size", 1)) if hasattr(sample, "dtype") else 1
