"""What a training job reads, and in which order. The order of an epoch is a function of (seed, epoch) alone."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor
from torch.utils.data import default_collate

from tuner.errors import FieldProblem, SpecError
from tuner.specs import SyntheticData, TextData, WorkloadData, WorkloadSpec
from tuner.workloads.base import Batch, Collates, HasDataset, Sample, Samples, Workload
from tuner.workloads.reference import NextTokenWorkload

_BYTE_VALUES = 256
_SHORTEST_SAMPLE = 2
"""A next-token sample of one token has nothing to predict."""


@dataclass(frozen=True)
class TrainingData:
    """Samples with random access, and how they become a batch."""

    samples: Samples
    collate: Callable[[list[Sample]], Batch]

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at ``indices``, on the CPU."""
        return self.collate([self.samples[index] for index in indices])


def build_data(spec: WorkloadSpec, workload: Workload) -> TrainingData:
    """The data of a spec.

    Raises:
        SpecError: when there is none, when a path matches no file, or when it does not go with the model.
    """
    data = spec.data
    match data:
        case None:
            raise _problem("data", "is required to train: `text` with paths, `synthetic`, or `workload`")
        case TextData():
            return _text(data, spec, workload)
        case SyntheticData():
            return TrainingData(SyntheticSamples(workload, data.samples), join_batches)
        case WorkloadData():
            return _own(workload)
        case _:
            assert_never(data)


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of an epoch's samples, int64 ``(length,)``: a permutation that depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(length, generator=generator)


def _problem(field: str, message: str, value: object = "") -> SpecError:
    return SpecError([FieldProblem(field, message, str(value) if value != "" else "")])


# --- text ------------------------------------------------------------------------------------------------------------


class ByteSamples:
    """A stream of bytes cut into samples of ``length`` tokens; the last one keeps what is left."""

    def __init__(self, stream: Tensor, length: int) -> None:
        self._stream = stream
        self._length = length
        whole, rest = divmod(len(stream), length)
        self._count = whole + (rest >= _SHORTEST_SAMPLE)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._stream[index * self._length : (index + 1) * self._length].long()


def _text(data: TextData, spec: WorkloadSpec, workload: Workload) -> TrainingData:
    if not isinstance(workload, NextTokenWorkload):
        raise _problem("data.kind", "`text` trains a causal language model; use `workload` or `synthetic`", data.kind)
    if workload.vocabulary_size < _BYTE_VALUES:
        raise _problem("data.tokenizer", f"bytes need 256 token ids, the model has {workload.vocabulary_size}")
    content = b"\n".join(path.read_bytes() for path in matching_files(data.paths))
    if len(content) < _SHORTEST_SAMPLE:
        raise _problem("data.paths", "these files hold no text", ", ".join(data.paths))
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return TrainingData(ByteSamples(stream, spec.batch.sequence_length or 0), workload.collate)


def matching_files(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns name, sorted, so that every host reads the same stream.

    Raises:
        SpecError: when a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        files = {Path(name).resolve() for name in glob.glob(pattern, recursive=True) if Path(name).is_file()}  # noqa: PTH207 - patterns may be absolute, which Path.glob refuses
        if not files:
            raise _problem("data.paths", f"no file matches (from {Path.cwd()})", pattern)
        found |= files
    return sorted(found)


# --- samples that the workload makes ---------------------------------------------------------------------------------


class SyntheticSamples:
    """Random worst-case samples, each a batch of one, the same for the same index."""

    def __init__(self, workload: Workload, count: int) -> None:
        self._workload = workload
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._count:
            raise IndexError(index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return self._workload.make_batch(1)


def join_batches(batches: list[Batch]) -> Batch:
    """Batches of the same structure as one, along the first dimension of every tensor."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {name: join_batches([batch[name] for batch in batches]) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(join_batches(list(parts)) for parts in zip(*batches, strict=True))
    return first


def _own(workload: Workload) -> TrainingData:
    if not isinstance(workload, HasDataset):
        raise _problem("data.kind", f"{type(workload).__name__} has no dataset()", "workload")
    samples = workload.dataset()
    if not len(samples):
        raise _problem("data.kind", "dataset() is empty", "workload")
    return TrainingData(samples, workload.collate if isinstance(workload, Collates) else default_collate)
