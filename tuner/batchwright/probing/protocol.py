"""Files that a supervisor and its probe processes exchange, and the time of each phase. No torch."""

import json
import time
from pathlib import Path
from typing import Literal, TypeAlias

from batchwright.errors import DeviceError, FieldProblem, SpecError
from batchwright.schemas.base import Document, NonNegativeInt
from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest
from batchwright.schemas.results import Phase, PhaseSeconds, ProbeResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.files import write_atomically
from batchwright.system.fork_server.tasks import TaskPaths

Task = Literal["probe", "check", "couple", "expect", "read"]


class DataRequest(Document):
    """A request to read the data of a spec."""

    spec: WorkloadSpec
    """The spec."""
    seconds: float
    """Time after which the reading ends."""
    named: NonNegativeInt | None = None
    """Number of a sample to name instead of reading it; None to read."""


TaskRequest: TypeAlias = ProbeRequest | WorkloadSpec | CouplingRequest | ExpectationRequest | DataRequest
"""The request of a task."""


class CheckReport(Document):
    """Outcome of building a workload without allocating its tensors."""

    problems: tuple[FieldProblem, ...] = ()
    """Invalid fields of the spec."""
    error: str | None = None
    """Any other reason why the workload cannot be built, with its traceback."""
    lost: str | None = None
    """Why the check has no outcome, which says nothing about the spec: it was killed, or ran out of host memory."""

    def to_error(self) -> SpecError | None:
        """Return the error to raise, or None."""
        problems = list(self.problems)
        if self.error is not None:
            problems.append(FieldProblem("model", f"cannot be built: {self.error}"))
        return SpecError(problems) if problems else None


class DataReport(Document):
    """Outcome of reading the data of a spec. Exactly one field is set."""

    reading: DataReading | None = None
    """What was read."""
    problems: tuple[FieldProblem, ...] = ()
    """Data that cannot be read, or does not fit the model."""
    unavailable: tuple[FieldProblem, ...] = ()
    """Why the hub, which has the tokenizer, does not answer."""
    host_failure: str | None = None
    """How the host failed, which says nothing of the data."""
    place: str | None = None
    """The place of the sample that was to be named."""


class CouplingOutcome(Document):
    """Outcome of the process that compares the loss of a batch with that of its parts."""

    check: CouplingCheck
    """The comparison, or why there is none."""
    device_error: str | None = None
    """How the device failed, so that no probe on it would tell more; None where it did not."""

    def require_device(self) -> CouplingCheck:
        """Return the check.

        Raises:
            DeviceError: when the device failed.
        """
        if self.device_error is not None:
            raise DeviceError(self.device_error)
        return self.check


class ProbePaths(TaskPaths):
    """The files of one task of a probe's fork server."""

    @property
    def phases(self) -> Path:
        """One line per phase entered, which shows how far a process that died had come."""
        return self.directory / "phases.jsonl"

    @property
    def progress(self) -> Path:
        """How far a reading of data has come (``ReadingProgress``)."""
        return self.directory / "progress"

    def record_phase(self, phase: Phase, at: float | None = None) -> None:
        """Record that ``phase`` begins now, or at ``at``, on the monotonic clock that all processes of a host share."""
        with self.phases.open("a") as stream:
            stream.write(json.dumps({"phase": phase, "at": time.monotonic() if at is None else at}) + "\n")

    def write_result(self, result: ProbeResult) -> None:
        """Write the result of a probe."""
        write_atomically(self.result, result.model_dump_json())

    def recorded_phases(self) -> list[tuple[Phase, float]]:
        """Return the phases entered so far, with their times on the monotonic clock."""
        if not self.phases.exists():
            return []
        rows = (json.loads(line) for line in self.phases.read_text().splitlines() if line.endswith("}"))
        return [(Phase(row["phase"]), float(row["at"])) for row in rows]


def phase_seconds(entered: list[tuple[Phase, float]], requested_at: float, ended_at: float) -> PhaseSeconds:
    """Compute the seconds spent in each phase, from the times at which the phases were entered."""
    ends = [*(at for _, at in entered[1:]), ended_at][: len(entered)]  # a process may end before its first phase
    spent = {phase: max(0.0, end - at) for (phase, at), end in zip(entered, ends, strict=True)}
    began = entered[0][1] if entered else ended_at
    return PhaseSeconds(
        start=max(0.0, began - requested_at) + spent.get(Phase.START, 0.0),
        build=spent.get(Phase.BUILD, 0.0),
        warmup=spent.get(Phase.WARMUP, 0.0),
        measure=spent.get(Phase.MEASURE, 0.0),
        total=max(0.0, ended_at - requested_at),
    )
