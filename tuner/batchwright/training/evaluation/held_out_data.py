"""Samples that are held out of training: a split of the data, or data of their own."""

from dataclasses import dataclass, replace

import torch

from batchwright.errors import SpecError
from batchwright.schemas.dataset.data_spec import HeldOutData
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.build import build_data, source_of
from batchwright.training.data.files import DataFolders
from batchwright.training.data.seeding import generator_from_key
from batchwright.workloads.base import Workload


@dataclass(frozen=True)
class RunData:
    """The data of a run, in two parts without a common sample."""

    training: TrainingData
    """Samples that train."""
    held_out: TrainingData | None
    """Samples to evaluate on; None without an evaluation."""


def build_run_data(spec: WorkloadSpec, workload: Workload, folders: DataFolders, ranks: int = 1) -> RunData:
    """Build the data of a spec, and its held-out part.

    Raises:
        SpecError: as ``build_data``; when the split leaves no sample to train, a file is in both parts, the two have
            other classes, or there are fewer held-out samples than ranks.
    """
    data, evaluation = build_data(spec, workload, folders), spec.evaluation
    if evaluation is None or (evaluation.data is None and _is_partial(folders)):
        return RunData(data, None)
    if evaluation.data is None:
        found = _split(data, evaluation)
    else:
        found = RunData(data, _own_data(spec, evaluation.data, workload, folders, data))
    held_out = len(found.held_out or ())
    if held_out < ranks and not _is_partial(folders):
        raise data_problem("evaluation", f"holds out {held_out} samples, fewer than the {ranks} ranks of the run")
    return found


def _split(data: TrainingData, evaluation: EvaluationSpec) -> RunData:
    field, samples = "count" if evaluation.count is not None else "fraction", len(data)
    count = evaluation.held_out_of(samples)
    if count >= samples:
        raise data_problem(f"evaluation.{field}", f"leaves none of the {samples} samples of the data to train", count)
    order = torch.randperm(samples, generator=generator_from_key("held out", evaluation.seed))
    return RunData(data.selected(order[count:]), data.selected(order[:count]))


def _is_partial(folders: DataFolders) -> bool:
    """Return whether only a part of the data was read, so that its size and its classes are not known."""
    return folders.reading is not None and folders.reading.is_partial


# --- data of its own ---


def _own_data(
    spec: WorkloadSpec, data: HeldOutData, workload: Workload, folders: DataFolders, training: TrainingData
) -> TrainingData:
    sources = [source_of(one, folders) for one in (spec.data, data) if one is not None]
    try:
        held_out = sources[1].read(spec.model_copy(update={"data": data}), workload, is_held_out=True)
        common = sources[0].files() & sources[1].files()
        if common:
            raise data_problem("data", "is also training data: held-out samples must not be trained on", min(common))
    except SpecError as error:
        problems = (
            replace(found, field=f"evaluation.{found.field}") if found.field.partition(".")[0] == "data" else found
            for found in error.problems
        )
        raise SpecError(list(problems)) from None
    others = sorted(set(held_out.classes) ^ set(training.classes))
    may_differ = held_out.classes != training.classes
    if not held_out.classes or not training.classes:  # names, and numbers in records
        may_differ = may_differ and any(source.may_number_classes for source in sources)
    if may_differ and not _is_partial(folders):
        message = (
            f"has other classes than the training data ({', '.join(others[:5])} in only one of them), so "
            "their numbers differ: give both a sample of each class, or use numbers as labels"
        )
        raise data_problem("evaluation.data", message)
    return held_out
