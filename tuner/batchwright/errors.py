"""The errors of the tuner: one base class, the tree below it, messages that name the value, the limit and the remedy.

::

    BatchwrightError
    |- SpecError            a document from the user is wrong (field, value, what is allowed)
       |- HubUnavailableError  the hub with the spec's model does not answer; the spec may be right
    |- UnreadableDocumentError  a stored document is not what this version reads
    |- DataOutsideRootsError  a file of the data lies outside the folders that may be read
    |- PlanError            no plan exists for these numbers
    |- SearchError          a result was recorded that the search cannot use
    |- DeviceError          the device is not there, or its limit cannot be applied
       |- VirtualGpuError   a virtual GPU cannot be described, built or used on this host
    |- WorkloadError        the user's model, batch or loss violates the workload interface
    |- HostFailureError     the host lacks a resource that all work needs: disk space, descriptors, processes
    |- ProbeError           the probing machinery itself failed (not the probed workload)
       |- CheckLostError    the process that checks a spec was killed or ran out of memory repeatedly
    |- ProbeCancelledError  a probe was ended on request
    |- TuningFailedError    a tuning ended without a recommendation; carries the evidence so far
    |- OutOfMemoryError     a device allocation failed; translated from the framework's own error at one seam
    |- InvalidSizeError     a kernel rejects the size for another reason than memory (32-bit index, launch limits)
    |- EstimateError        memory cannot be estimated: the workload cannot be traced, or an unknown GPU was named
       |- EstimateTimedOutError   tracing exceeded its time limit
       |- EstimateCancelledError  an estimate was ended on request
    |- ExportError          a recommendation cannot be exported as requested
    |- ServingError         the service cannot be started; raised by the command line
    |- StorageError         a disk has no space for a file; also an OSError
    |- TrainingError        a training run cannot start or continue
       |- CheckpointError   a checkpoint cannot be written, read, or does not belong to this run
          |- DamagedCheckpointError   its files are incomplete or changed
       |- NotFiniteError    the loss, gradient or weights of a run are infinite or NaN
       |- PeerError         another rank of the run failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class BatchwrightError(Exception):
    """Base of every error raised by the tuner."""


@dataclass(frozen=True)
class FieldProblem:
    """A problem of a document: the field, the allowed values and the wrong value."""

    field: str
    message: str
    value: str = ""

    def __str__(self) -> str:
        """``model.layers: must be at least 1 (got 0)``; the message alone if it is of no single field."""
        got = f" (got {self.value})" if self.value else ""
        return f"{self.field}: {self.message}{got}" if self.field else f"{self.message}{got}"


class SpecError(BatchwrightError):
    """A spec or request is wrong. ``problems`` lists every field at fault."""

    def __init__(self, problems: list[FieldProblem], document: str = "spec") -> None:
        self.problems = problems
        self.document = document
        super().__init__(f"invalid {document}:\n" + "\n".join(f"  {problem}" for problem in problems))

    def __reduce__(self) -> tuple[type[SpecError], tuple[list[FieldProblem], str]]:
        """Pickle the arguments, which are not those of ``Exception``: data is read in other processes."""
        return type(self), (self.problems, self.document)


class HubUnavailableError(SpecError):
    """The Hugging Face hub, which has the model of the spec, refuses connections, fails or takes too long."""


class UnreadableDocumentError(BatchwrightError):
    """A stored document lacks what this version needs, or has a value that it does not know."""


class DataOutsideRootsError(BatchwrightError):
    """A file of the training data, or the target of a link, lies outside the folders that may be read."""


class PlanError(BatchwrightError):
    """No accumulation plan exists for these numbers; the message names the number to change."""


class SearchError(BatchwrightError):
    """The search was given a result that it cannot use, such as a size outside its bounds."""


class DeviceError(BatchwrightError):
    """A device does not exist, or a memory limit cannot be applied to it."""


class VirtualGpuError(DeviceError):
    """A virtual GPU cannot be described, built or used on this host."""


class WorkloadError(BatchwrightError):
    """A workload violates its interface (see ``batchwright.workloads.base.Workload``)."""


class ProbeError(BatchwrightError):
    """The probing machinery failed, as opposed to the workload that was probed."""


class CheckLostError(ProbeError):
    """The process that checks a spec was killed or ran out of memory repeatedly. The spec may be valid."""


class HostFailureError(BatchwrightError):
    """The host lacks a resource that all work needs.

    Args:
        cause: a stable word, one of ``batchwright.system.host_failures.Cause``.
        message: the missing resource and its place.
        needed_bytes: disk space that the work needs to continue, where known.
    """

    def __init__(self, cause: str, message: str, needed_bytes: int = 0) -> None:
        self.cause = cause
        self.needed_bytes = needed_bytes
        super().__init__(message)

    def __reduce__(self) -> tuple[type[HostFailureError], tuple[str, str, int]]:
        """Pickle the arguments, as ``SpecError`` does."""
        return type(self), (self.cause, str(self), self.needed_bytes)


class ProbeCancelledError(BatchwrightError):
    """A probe was ended on request of its caller."""


class TuningFailedError(BatchwrightError):
    """A tuning ended without a recommendation. ``reason`` is a stable word; the message has the evidence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class OutOfMemoryError(BatchwrightError):
    """The device could not allocate the requested memory."""


class InvalidSizeError(BatchwrightError):
    """The micro-batch is too large for a kernel for a reason other than memory."""


class EstimateError(BatchwrightError):
    """Memory cannot be estimated; the message has the reason."""


class EstimateTimedOutError(EstimateError):
    """Tracing exceeded its time limit."""


class EstimateCancelledError(EstimateError):
    """An estimate was ended on request of its caller."""


ExportRefusal = Literal[
    "unknown-format",
    "unknown-version",
    "wrong-option",
    "wrong-environment",
    "infeasible",
    "inexact",
    "not-expressible",
]
"""Reasons not to export a recommendation: stable words."""


class ExportError(BatchwrightError):
    """A recommendation cannot be exported as requested, for this ``reason``."""

    def __init__(self, reason: ExportRefusal, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class ServingError(BatchwrightError):
    """The service cannot be started as requested."""


class StorageError(BatchwrightError, OSError):
    """A disk has no space for a file. ``errno`` distinguishes a full disk, a quota and a limit on file size.

    ``needed_bytes`` is the size of the file, where known.
    """

    def __init__(self, message: str, number: int, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.errno = number
        self.needed_bytes = needed_bytes


class TrainingError(BatchwrightError):
    """A training run cannot start or continue."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are incomplete, or differ from the ones that were written."""


class NotFiniteError(TrainingError):
    """The loss, the gradient or the weights of a run are infinite or NaN, so that training on is in vain."""


class PeerError(TrainingError):
    """Another rank of the run failed, so that this one cannot continue."""
