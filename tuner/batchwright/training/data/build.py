"""Build the data of a spec: ``SOURCES`` lists the kinds of data."""

from typing import Any

from batchwright.schemas.dataset.data_spec import DataSpec
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem, import_optional
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import start_parsers
from batchwright.training.data.source import DataSource
from batchwright.training.data.sources.arrays import ArraysSource
from batchwright.training.data.sources.images import ImagesSource
from batchwright.training.data.sources.records import RecordsSource
from batchwright.training.data.sources.text import TextSource
from batchwright.training.data.sources.workload_samples import SyntheticSource, WorkloadSource
from batchwright.workloads.base import Workload

SOURCES: dict[str, type[DataSource[Any]]] = {
    "text": TextSource,
    "records": RecordsSource,
    "images": ImagesSource,
    "arrays": ArraysSource,
    "synthetic": SyntheticSource,
    "workload": WorkloadSource,
}
"""The source of each kind of data."""


def source_of(data: DataSpec, folders: DataFolders) -> DataSource[Any]:
    """Return the source of a document."""
    return SOURCES[data.kind](data, folders)


def prepare_reading(spec: WorkloadSpec) -> None:
    """Import the packages that the data of a spec needs, and start the parent of the parsers' processes.

    Called before this process has threads (``foreign.start_parsers``).

    Raises:
        SpecError: when a package is not installed.
    """
    read = [data for data in spec.data_by_field.values() if data.paths_read()]
    for data in read:
        for module, field in source_of(data, DataFolders()).modules().items():
            import_optional(module, f"data.{field}", getattr(data, field) or "")
    if read:
        start_parsers()


def build_data(spec: WorkloadSpec, workload: Workload, folders: DataFolders | None = None) -> TrainingData:
    """Build the data of a spec. Without ``folders`` any file may be read.

    Raises:
        SpecError: when the spec has no data, when a path matches no file or one outside the folders, or when the data
            does not fit the model.
    """
    if spec.data is None:
        *kinds, last = (f"`{kind}`" for kind in SOURCES)
        raise data_problem("data", f"is required to train: {', '.join(kinds)} or {last}")
    return source_of(spec.data, folders or DataFolders()).read(spec, workload)
