"""What a supervisor and its probe processes leave for each other on disk, and how long each phase took. No torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tuner.errors import FieldProblem, SpecError
from tuner.schemas.base import Document
from tuner.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest
from tuner.schemas.results import Phase, PhaseSeconds
from tuner.schemas.workload import WorkloadSpec
from tuner.system.files import tail, write_atomically

Task = Literal["probe", "check", "couple", "expect"]

TaskRequest: TypeAlias = ProbeRequest | WorkloadSpec | CouplingRequest | ExpectationRequest
"""What a task is given."""


class FieldReport(Document):
    """A ``FieldProblem`` on its way between processes."""

    field: str
    """Dotted path of the field."""
    message: str
    """What is allowed."""
    value: str
    """What it says."""


class CheckReport(Document):
    """What building a workload without memory found."""

    problems: tuple[FieldReport, ...] = ()
    """Fields at fault, when the spec is wrong."""
    error: str | None = None
    """Any other reason why the workload cannot be built, with its traceback."""
    lost: str | None = None
    """Why the check found nothing out, which says nothing of the spec: it was killed, or found no memory."""

    @classmethod
    def of(cls, error: SpecError) -> CheckReport:
        """The report of a wrong spec."""
        return cls(
            problems=tuple(FieldReport(field=it.field, message=it.message, value=it.value) for it in error.problems)
        )

    def to_error(self) -> SpecError | None:
        """The error to raise, if there is one."""
        problems = [FieldProblem(item.field, item.message, item.value) for item in self.problems]
        if self.error is not None:
            problems.append(FieldProblem("model", f"cannot be built: {self.error}"))
        return SpecError(problems) if problems else None


@dataclass(frozen=True)
class ProbePaths:
    """The files of one task, in a directory of its own. Nothing else builds these names."""

    directory: Path

    @property
    def request(self) -> Path:
        """The ``TaskRequest`` (JSON)."""
        return self.directory / "request.json"

    @property
    def result(self) -> Path:
        """The document that the task leaves, a ``ProbeResult`` for example; absent when the process died first."""
        return self.directory / "result.json"

    @property
    def phases(self) -> Path:
        """One line per phase entered: how far a process that died had got."""
        return self.directory / "phases.jsonl"

    @property
    def output(self) -> Path:
        """What the process printed, and the stacks it dumped when it was asked where it hangs."""
        return self.directory / "output.txt"

    def write_request(self, request: TaskRequest) -> None:
        """Make the directory and put the request in it."""
        self.directory.mkdir(parents=True)
        write_atomically(self.request, request.model_dump_json())

    def enter(self, phase: Phase) -> None:
        """Note that ``phase`` begins now, on the clock all processes of a host share."""
        with self.phases.open("a") as stream:
            stream.write(json.dumps({"phase": phase, "at": time.monotonic()}) + "\n")

    def entered(self) -> list[tuple[Phase, float]]:
        """The phases entered so far, with their times on the monotonic clock."""
        if not self.phases.exists():
            return []
        rows = (json.loads(line) for line in self.phases.read_text().splitlines() if line.endswith("}"))
        return [(Phase(row["phase"]), float(row["at"])) for row in rows]

    def output_tail(self, length_bytes: int = 4000) -> str:
        """The end of what the process printed."""
        return tail(self.output, length_bytes) if self.output.exists() else ""


def phase_seconds(entered: list[tuple[Phase, float]], requested: float, ended: float) -> PhaseSeconds:
    """Seconds spent in each phase, from the times the phases were entered."""
    ends = [*(at for _, at in entered[1:]), ended][: len(entered)]  # a process may end before its first phase
    spent = {phase: max(0.0, end - at) for (phase, at), end in zip(entered, ends, strict=True)}
    began = entered[0][1] if entered else ended
    return PhaseSeconds(
        start=max(0.0, began - requested) + spent.get(Phase.START, 0.0),
        build=spent.get(Phase.BUILD, 0.0),
        warmup=spent.get(Phase.WARMUP, 0.0),
        measure=spent.get(Phase.MEASURE, 0.0),
        total=max(0.0, ended - requested),
    )
