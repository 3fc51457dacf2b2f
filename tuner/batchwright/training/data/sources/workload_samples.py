"""Samples from the workload: synthetic samples, or its own data set."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchwright.schemas.dataset.data_spec import SyntheticData, WorkloadData
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.seeding import seed_from_key
from batchwright.training.data.source import DataSource
from batchwright.training.micro_batches.nested_batches import entries_of, is_container, rebuilt
from batchwright.training.micro_batches.rng_state import preserved_random_state
from batchwright.workloads.base import Batch, Collates, HasDataset, HasEvaluationDataset, Samples, Workload


class SyntheticSamples:
    """Random worst-case samples. Each is a batch of one sample, and a function of its index."""

    def __init__(self, workload: Workload, count: int) -> None:
        self._workload = workload
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._count:
            raise IndexError(index)
        with preserved_random_state():
            seed_from_key("synthetic", index)
            return self._workload.make_batch(1)


def join_batches(batches: list[Batch]) -> Batch:
    """Join batches of the same structure along the first dimension of every tensor."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    entries = ([value for _, value in entries_of(batch)] for batch in batches)
    joined = [join_batches(list(parts)) for parts in zip(*entries, strict=True)]
    return rebuilt(first, joined) if is_container(first) else first


class SyntheticSource(DataSource[SyntheticData]):
    """Random samples of the workload's worst case."""

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Make as many as the document says."""
        del spec
        return TrainingData(SyntheticSamples(workload, self.data.samples), join_batches)


class WorkloadSource(DataSource[WorkloadData]):
    """The workload's own data sets. Raises a ``SpecError`` when it lacks one, or it is empty."""

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the workload's ``dataset()``."""
        del spec
        return _data_of(workload, "dataset", workload.dataset if isinstance(workload, HasDataset) else None)

    def _read_held_out(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the workload's ``evaluation_dataset()``."""
        del spec
        make = workload.evaluation_dataset if isinstance(workload, HasEvaluationDataset) else None
        return _data_of(workload, "evaluation_dataset", make)


def _data_of(workload: Workload, method: str, make: Callable[[], Samples] | None) -> TrainingData:
    if make is None:
        raise data_problem("data.kind", f"{type(workload).__name__} has no {method}()", "workload")
    samples = make()
    if not len(samples):
        raise data_problem("data.kind", f"{method}() is empty", "workload")
    collate = workload.collate if isinstance(workload, Collates) else default_collate
    return TrainingData(samples, collate, may_be_random=True)
