"""Samples that are held out of training: a split of the data, or data of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchwright.errors import SpecError
from batchwright.schemas.dataset.data_spec import DataSpec, ImagesData, RecordsData, WorkloadData
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec, HeldOutData
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.build import build_data
from batchwright.training.data.files import DataFolders
from batchwright.training.data.seeding import generator_from_key
from batchwright.training.data.sources.images import image_files
from batchwright.training.data.sources.workload_samples import held_out_workload_data
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

    Args:
        spec: the spec of the run.
        workload: the workload.
        folders: folders that may be read.
        ranks: ranks of the run, each of which evaluates a share.

    Raises:
        SpecError: as ``build_data``; when the split leaves no sample to train, a file is in both parts, the two have
            other classes, or there are fewer held-out samples than ranks.
    """
    found = _parts(spec, workload, folders)
    held_out = len(found.held_out or ())
    if spec.evaluation is not None and held_out < ranks and not _is_partial(folders):
        raise data_problem("evaluation", f"holds out {held_out} samples, fewer than the {ranks} ranks of the run")
    return found


def _parts(spec: WorkloadSpec, workload: Workload, folders: DataFolders) -> RunData:
    data, evaluation = build_data(spec, workload, folders), spec.evaluation
    if evaluation is None:
        return RunData(data, None)
    if evaluation.data is None:
        return RunData(data, None) if _is_partial(folders) else _split(data, evaluation)
    return RunData(data, _own_data(spec, evaluation.data, workload, folders, data))


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
    try:
        if isinstance(data, WorkloadData):
            return held_out_workload_data(workload)
        held_out = build_data(spec.model_copy(update={"data": data}), workload, folders)
        common = _files(spec.data, folders) & _files(data, folders)
        if common:
            raise data_problem("data", "is training data too: held-out samples must not train", min(common))
    except SpecError as error:
        problems = (
            replace(found, field=f"evaluation.{found.field}") if found.field.partition(".")[0] == "data" else found
            for found in error.problems
        )
        raise SpecError(list(problems)) from None
    if not _is_partial(folders) and _may_differ(spec.data, data, training.classes, held_out.classes):
        others = sorted(set(held_out.classes) ^ set(training.classes))
        message = (
            f"has other classes than the training data ({', '.join(others[:5])} in one of them alone), so that their "
            "numbers differ: give both a sample of each class, or numbers as labels"
        )
        raise data_problem("evaluation.data", message)
    return held_out


def _may_differ(
    training: DataSpec | None, held_out: HeldOutData, classes: tuple[str, ...], others: tuple[str, ...]
) -> bool:
    """Return whether equal numbers may be other classes: of other names, or of names and numbers in records."""
    if classes and others:
        return classes != others
    return bool(classes or others) and any(isinstance(data, RecordsData) for data in (training, held_out))


def _files(data: DataSpec | None, folders: DataFolders) -> set[Path]:
    if data is None:
        return set()
    if isinstance(data, ImagesData):
        return {file.resolve() for file in image_files(data.path, folders)}
    samples_read = (read for read in data.paths_read() if read.field not in {"tokenizer", "chat_template"})
    return set(folders.matching([read.pattern for read in samples_read]))
