"""Exit codes of errors."""

from batchwright.cli.errors import ExitCode, exit_code
from batchwright.errors import BatchwrightError, ExportError

_CODES = {
    "HubUnavailableError": ExitCode.DEVICE,
    "SpecError": ExitCode.WRONG_INPUT,
    "UnreadableDocumentError": ExitCode.UNEXPECTED,
    "DataOutsideRootsError": ExitCode.WRONG_INPUT,
    "PlanError": ExitCode.WRONG_INPUT,
    "SearchError": ExitCode.UNEXPECTED,
    "DeviceError": ExitCode.DEVICE,
    "VirtualGpuError": ExitCode.DEVICE,
    "WorkloadError": ExitCode.TUNING_FAILED,
    "HostFailureError": ExitCode.DEVICE,
    "ProbeError": ExitCode.TUNING_FAILED,
    "CheckLostError": ExitCode.TUNING_FAILED,
    "ProbeCancelledError": ExitCode.INTERRUPTED,
    "TuningFailedError": ExitCode.TUNING_FAILED,
    "OutOfMemoryError": ExitCode.TUNING_FAILED,
    "InvalidSizeError": ExitCode.TUNING_FAILED,
    "EstimateError": ExitCode.TUNING_FAILED,
    "EstimateTimedOutError": ExitCode.TUNING_FAILED,
    "EstimateCancelledError": ExitCode.INTERRUPTED,
    "ExportError": ExitCode.WRONG_INPUT,
    "ServingError": ExitCode.WRONG_INPUT,
    "StorageError": ExitCode.DEVICE,
    "TrainingError": ExitCode.TRAINING_FAILED,
    "CheckpointError": ExitCode.TRAINING_FAILED,
    "DamagedCheckpointError": ExitCode.TRAINING_FAILED,
    "NotFiniteError": ExitCode.TRAINING_FAILED,
    "PeerError": ExitCode.TRAINING_FAILED,
}


def _tree(root: type[BatchwrightError]) -> list[type[BatchwrightError]]:
    """Return the subclasses of ``root`` that this project defines, at any depth."""
    below = [kind for kind in root.__subclasses__() if kind.__module__ == root.__module__]
    return [found for kind in below for found in (kind, *_tree(kind))]


def _raised(kind: type[BatchwrightError]) -> BatchwrightError:
    """Return an error of this class, whatever its constructor takes."""
    error = kind.__new__(kind)
    vars(error).update(reason="inexact")
    return error


def test_every_error_has_a_deliberate_exit_code() -> None:
    """A new class of the tree of errors is missing here until someone has chosen its code."""
    assert {kind.__name__: exit_code(_raised(kind)) for kind in _tree(BatchwrightError)} == _CODES


def test_nothing_that_fits_has_a_code_of_its_own() -> None:
    """Exit code 3 for the export of a recommendation in which nothing fits."""
    assert exit_code(ExportError("infeasible", "nothing fits")) is ExitCode.INFEASIBLE
