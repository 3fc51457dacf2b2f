"""Samples with random access and their collation into batches; errors and packages of the data of a spec."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from batchwright.errors import FieldProblem, SpecError
from batchwright.training.data.seeding import seed_from_key
from batchwright.training.micro_batches.rng_state import preserved_random_state
from batchwright.workloads.base import Batch, Sample, Samples


class SelectedSamples:
    """Some of the samples of a data set."""

    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self._samples = samples
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self._indices):
            raise IndexError(index)
        return self._samples[int(self._indices[index])]

    def place(self, index: int) -> str:
        """Name a sample, as ``place_of``."""
        return place_of(self._samples, int(self._indices[index]))


def place_of(samples: Samples, index: int) -> str:
    """Name the file and the row of a sample where the data set knows them, else its number from 1."""
    place: Callable[[int], str] | None = getattr(samples, "place", None)
    return f"sample {index + 1}" if place is None else place(index)


@dataclass(frozen=True)
class TrainingData:
    """Samples with random access, and their collation."""

    samples: Samples
    """Samples, equal on every host."""
    collate: Callable[[list[Sample]], Batch]
    """Makes a batch of samples, on the CPU."""
    may_be_random: bool = False
    """True if samples or ``collate`` are user code, which may draw random numbers (augmentation)."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers, where the data has names."""
    notes: tuple[str, ...] = ()
    """Facts that the user should know of the samples, a sentence each."""
    lengths: Tensor | None = None
    """Length of each sample in any unit, int64 ``(samples,)``, by which samples are grouped. None if they have one
    length, or an unknown one."""

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return len(self.samples)

    def selected(self, indices: Tensor) -> TrainingData:
        """Return the data with the samples at ``indices`` alone, int64 ``(count,)``, in increasing order."""
        indices = indices.sort().values
        lengths = None if self.lengths is None else self.lengths[indices]
        return replace(self, samples=SelectedSamples(self.samples, indices), lengths=lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Collate the samples at ``indices``, on the CPU."""
        return self.collate([self.samples[index] for index in indices])

    def load(self, epoch: int, indices: Sequence[int], seed: int) -> Batch:
        """Load and collate the samples at ``indices`` in an epoch, on the CPU.

        Random choices of user code depend only on (seed, epoch, index) for a sample, and on all indices for a
        collation. They depend neither on the division of an update, nor on the process that loads, nor on a resume. The
        random generators of this process are restored.
        """
        if not self.may_be_random:
            return self.batch(indices)
        with preserved_random_state():
            samples = []
            for index in indices:
                seed_from_key("sample", seed, epoch, index)
                samples.append(self.samples[index])
            seed_from_key("collate", seed, epoch, *indices)
            return self.collate(samples)


def class_numbers(names: Iterable[str], config: Any) -> dict[str, int]:  # noqa: ANN401 - a transformers configuration, or none
    """Number named classes: as the model's config does (`id2label`), where it has all of them, else in sorted order.

    Returns:
        Numbers by name, rising; all of the config's names, or ``names``.
    """
    found = set(names)
    known: dict[int, str] = getattr(config, "id2label", None) or {}
    if found <= set(known.values()):
        return {known[number]: number for number in sorted(known)}
    return {name: number for number, name in enumerate(sorted(found))}


def data_problem(field: str, message: str, value: object = "") -> SpecError:
    """Make the error about a field of the spec, named by its dotted path."""
    return SpecError([FieldProblem(field, message, str(value) if value != "" else "")])


RENDERER = "transformers.utils.chat_template_utils"
"""Module that renders chat templates."""


def import_optional(module: str, field: str, value: str) -> Any:  # noqa: ANN401 - a module, whose names only it knows
    """Import a module.

    Raises:
        SpecError: when its package is not installed, with the field that needs it and the command to install it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its dependencies is not
        package = {"PIL": "pillow"}.get(package, package)
        message = f"needs the package `{package}`, which is not installed: pip install 'batchwright[data]'"
        raise data_problem(field, message, value) from None
