"""Build the data of a spec."""

from __future__ import annotations

from typing import assert_never

from batchwright.schemas.dataset.data_spec import (
    ArraysData,
    ImagesData,
    RecordsData,
    SyntheticData,
    TextData,
    WorkloadData,
)
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import start_parsers
from batchwright.training.data.sources.arrays import arrays_data
from batchwright.training.data.sources.images import images_data
from batchwright.training.data.sources.packages import RENDERER, import_optional
from batchwright.training.data.sources.records import records_data
from batchwright.training.data.sources.text import text_data
from batchwright.training.data.sources.workload_samples import SyntheticSamples, join_batches, workload_data
from batchwright.workloads.base import Workload


def prepare_reading(spec: WorkloadSpec) -> None:
    """Import the packages that the data of a spec needs, and start the parent of the parsers' processes.

    Called before this process has threads (``foreign.start_parsers``).

    Raises:
        SpecError: when a package is not installed.
    """
    read = [data for data in spec.data_by_field.values() if data.paths_read()]
    for data in read:
        if isinstance(data, RecordsData):
            import_optional("datasets", "data.kind", data.kind)
        if isinstance(data, (RecordsData, TextData)) and data.tokenizer != "bytes":
            import_optional("tokenizers", "data.tokenizer", data.tokenizer)
        if isinstance(data, RecordsData) and (data.messages_field or data.chat_template):
            import_optional(RENDERER, "data.chat_template", "")
    if read:
        start_parsers()


def build_data(spec: WorkloadSpec, workload: Workload, folders: DataFolders | None = None) -> TrainingData:
    """Build the data of a spec. Without ``folders`` any file may be read.

    The first sample is read once, so that all modules that reading needs are in memory, unless the data is user code.

    Raises:
        SpecError: when the spec has no data, when a path matches no file or one outside the folders, or when the data
            does not fit the model.
    """
    data = _built(spec, workload, folders or DataFolders())
    if not data.may_be_random:
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
