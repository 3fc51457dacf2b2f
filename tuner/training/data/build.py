"""Build the data of a spec."""

from __future__ import annotations

from typing import assert_never

from tuner.schemas.dataset import ArraysData, ImagesData, RecordsData, SyntheticData, TextData, WorkloadData
from tuner.schemas.workload import WorkloadSpec
from tuner.training.data.base import TrainingData, data_problem
from tuner.training.data.files import DataFolders
from tuner.training.data.sources.arrays import arrays_data
from tuner.training.data.sources.images import images_data
from tuner.training.data.sources.own import SyntheticSamples, join_batches, workload_data
from tuner.training.data.sources.records import records_data
from tuner.training.data.sources.text import text_data
from tuner.workloads.base import Workload


def build_data(spec: WorkloadSpec, workload: Workload, folders: DataFolders | None = None) -> TrainingData:
    """Build the data of a spec, from any file when ``folders`` is None.

    Unless the data is the user's own, the first sample is read once, so that all that reading needs is in memory.

    Raises:
        SpecError: when there is none, when a path matches no file or one outside the folders, or when the data do not
            go with the model.
    """
    data = _built(spec, workload, folders or DataFolders())
    if not data.chooses_randomly:
        data.batch([0])
    return data


def _built(spec: WorkloadSpec, workload: Workload, folders: DataFolders) -> TrainingData:
    data = spec.data
    match data:
        case None:
            kinds = "`text`, `records`, `images`, `arrays`, `synthetic` or `workload`"
            raise data_problem("data", f"is required to train: {kinds}")
        case TextData():
            return text_data(data, spec, workload, folders)
        case RecordsData():
            return records_data(data, spec, workload, folders)
        case ImagesData():
            return images_data(data, spec, workload, folders)
        case ArraysData():
            return arrays_data(data, spec, workload, folders)
        case SyntheticData():
            return TrainingData(SyntheticSamples(workload, data.samples), join_batches)
        case WorkloadData():
            return workload_data(workload)
        case _:
            assert_never(data)
