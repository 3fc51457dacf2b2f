"""What a run asks of a kind of training data: one class for each kind, in a module of ``sources``."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from batchwright.schemas.dataset.data_spec import DataSpec
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData
from batchwright.training.data.files import DataFolders
from batchwright.workloads.base import Workload

_Data = TypeVar("_Data", bound=DataSpec)


class DataSource(ABC, Generic[_Data]):
    """The data that a document of one kind describes.

    Args:
        data: the document.
        folders: the folders that may be read.
    """

    may_number_classes = False
    """True if labels may be numbers of classes, which another data set names."""

    def __init__(self, data: _Data, folders: DataFolders) -> None:
        self.data = data
        self.folders = folders

    def modules(self) -> dict[str, str]:
        """Return the modules of optional packages that reading needs, with the field of ``data`` that asks for each."""
        return {}

    def read(self, spec: WorkloadSpec, workload: Workload, *, is_held_out: bool = False) -> TrainingData:
        """Read the samples to train, or those to evaluate on, for the model of a spec.

        The first one is read once, so that all modules that reading needs are in memory, unless it is user code.

        Raises:
            SpecError: when the data cannot be read, or does not fit the model.
        """
        found = self._read_held_out(spec, workload) if is_held_out else self._read(spec, workload)
        if not found.may_be_random:
            found.batch([0])
        return found

    @abstractmethod
    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData: ...

    def _read_held_out(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        return self._read(spec, workload)

    def files(self) -> set[Path]:
        """Return the real paths of the files with samples; none if they are not known."""
        return set(self.folders.matching([read.pattern for read in self.data.paths_read() if read.has_samples]))
