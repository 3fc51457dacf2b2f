"""The errors of the tuner: one base class, the tree below it, messages that name the value, the limit and the remedy.

::

    BatchwrightError
    |- SpecError            a document from the user is wrong (field, value, what is allowed)
    |- DataOutsideRootsError  a file of the data lies outside the folders that may be read
    |- PlanError            no plan exists for these numbers
    |- SearchError          an outcome was reported that the search did not ask for
    |- DeviceError          the device is not there, or its limit cannot be applied
    |- WorkloadError        the user's model, batch or loss breaks the workload contract
    |- HostFailureError     the host lacks what any work needs: room on a disk, descriptors, processes
    |- ProbeError           the probing machinery itself failed (not the probed workload)
       |- CheckLostError    the process that checks a spec was killed, or found no memory, again and again
    |- ProbeCancelledError  a probe was ended on request
    |- TuningFailedError    a tuning ended without an answer; carries the evidence so far
    |- OutOfMemoryError     a device allocation failed; translated from the framework's own error at one seam
    |- InvalidSizeError     the size is illegal for a kernel (32-bit index, launch configuration), memory aside
    |- EstimateError        memory cannot be estimated: the workload cannot be traced, or an unknown GPU was named
       |- EstimateTimedOutError   tracing took longer than it was given
       |- EstimateCancelledError  an estimate was ended on request
    |- ExportError          a recommendation cannot be exported as asked
    |- ServingError         the service cannot be served; raised by the command line in the service's words
    |- StorageError         a disk has no room for a file; an OSError too
    |- TrainingError        a training run cannot start or go on
       |- CheckpointError   a checkpoint cannot be written, read, or does not belong to this run
          |- DamagedCheckpointError   its files are not the ones that were written
       |- PeerError         another rank of the run failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class BatchwrightError(Exception):
    """Base of every error raised by the tuner."""


@dataclass(frozen=True)
class FieldProblem:
    """One thing wrong in a document: where it is, what it says, what is allowed there."""

    field: str
    message: str
    value: str = ""

    def __str__(self) -> str:
        """``model.layers: must be at least 1 (got 0)``."""
        got = f" (got {self.value})" if self.value else ""
        return f"{self.field}: {self.message}{got}"


class SpecError(BatchwrightError):
    """A spec or request is wrong. ``problems`` lists every field at fault."""

    def __init__(self, problems: list[FieldProblem], document: str = "spec") -> None:
        self.problems = problems
        self.document = document
        super().__init__(f"invalid {document}:\n" + "\n".join(f"  {problem}" for problem in problems))


class DataOutsideRootsError(BatchwrightError):
    """A file of the training data lies outside the folders that may be read, or a link leads there."""


class PlanError(BatchwrightError):
    """No accumulation plan exists for these numbers; the message says which one to change."""


class SearchError(BatchwrightError):
    """The search was told something it cannot use, such as a size outside its bounds."""


class DeviceError(BatchwrightError):
    """A device does not exist, or a memory limit cannot be applied to it."""


class WorkloadError(BatchwrightError):
    """A workload breaks its contract (see ``tuner.workloads.base.Workload``)."""


class ProbeError(BatchwrightError):
    """The probing machinery failed, as opposed to the workload that was probed."""


class CheckLostError(ProbeError):
    """The process that checks a spec was killed or found no memory, again and again: the spec may well be right."""


class HostFailureError(BatchwrightError):
    """The host lacks what any work needs.

    Args:
        cause: a stable word, one of ``tuner.system.host_failures.Cause``.
        message: what is lacking, and where.
        needed_bytes: room on the disk without which the work cannot go on, where that is known.
    """

    def __init__(self, cause: str, message: str, needed_bytes: int = 0) -> None:
        self.cause = cause
        self.needed_bytes = needed_bytes
        super().__init__(message)


class ProbeCancelledError(BatchwrightError):
    """A probe was ended because its caller asked for it."""


class TuningFailedError(BatchwrightError):
    """A tuning ended without an answer. ``reason`` is a stable word; the message carries the evidence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class OutOfMemoryError(BatchwrightError):
    """The device could not give the memory that was asked for."""


class InvalidSizeError(BatchwrightError):
    """The micro-batch is too large for a kernel for a reason other than memory."""


class EstimateError(BatchwrightError):
    """Memory cannot be estimated; the message says what stands in the way."""


class EstimateTimedOutError(EstimateError):
    """Tracing took longer than the time it was given."""


class EstimateCancelledError(EstimateError):
    """An estimate was ended because its caller asked for it."""


ExportRefusal = Literal[
    "unknown-format",
    "unknown-version",
    "wrong-option",
    "wrong-environment",
    "infeasible",
    "inexact",
    "not-expressible",
]
"""Why a recommendation is not exported: stable words."""


class ExportError(BatchwrightError):
    """A recommendation cannot be exported as asked, for this ``reason``."""

    def __init__(self, reason: ExportRefusal, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class ServingError(BatchwrightError):
    """The service cannot be served as it was asked for."""


class StorageError(BatchwrightError, OSError):
    """A disk has no room for a file. ``errno`` tells a full disk, a quota and a limit on a file's size apart.

    ``needed_bytes`` is the size of the file, where that is known.
    """

    def __init__(self, message: str, number: int, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.errno = number
        self.needed_bytes = needed_bytes


class TrainingError(BatchwrightError):
    """A training run cannot start, or cannot go on."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are incomplete, or differ from the ones that were written."""


class PeerError(TrainingError):
    """Another rank of the run failed, so that this one cannot go on."""
