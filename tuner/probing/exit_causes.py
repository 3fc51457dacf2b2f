"""The ends of tasks that left no document: the meaning of each for a probe, a check of a spec, and one of a loss."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from tuner.probing.protocol import CheckReport
from tuner.schemas.base import DocumentT
from tuner.schemas.recommendation import CouplingCheck
from tuner.schemas.requests import CouplingRequest, ProbeRequest
from tuner.schemas.results import Outcome, Phase, ProbeResult
from tuner.system.process_exit import ExitKind, ProcessExit


@dataclass(frozen=True)
class Ended:
    """How a task's process ended, and what it left."""

    exit: ProcessExit | None
    """None when the fork server itself was lost."""
    timed_out: bool
    requested: float
    """When the task was sent to the server, on the monotonic clock."""
    ended: float
    output: str
    """The end of its output; how the fork server ended, when that was lost."""
    result: bytes | None
    """The document that the task left."""
    entered: list[tuple[Phase, float]]
    """The phases that it entered, with their times."""

    def document(self, kind: type[DocumentT]) -> DocumentT | None:
        """Return the document that the task left; None where there is none, or no whole one."""
        try:
            return None if self.result is None else kind.model_validate_json(self.result)
        except ValidationError:
            return None

    @property
    def was_lost(self) -> bool:
        """Return whether something outside ended the process or the fork server, so that the task is not to blame."""
        return not self.timed_out and (self.exit is None or self.exit.kind is ExitKind.KILLED)


def uncompared(request: CouplingRequest, ended: Ended) -> CouplingCheck:
    """The outcome of a check for coupled samples whose process left none."""
    cause = f"ended with {ended.exit.cause}" if ended.exit else "was lost"
    cause = f"did not end within {request.timeout_seconds:g} s" if ended.timed_out else cause
    return CouplingCheck(verdict="not-compared", message=f"the check {cause}.")


def report_of_dead_check(ended: Ended, timeout_seconds: float) -> CheckReport:
    """The report of a check whose process left none: a crash, or an end of its own making, is the workload's fault."""
    if ended.timed_out:
        return CheckReport(error=f"it was not built within {timeout_seconds:g} s\n{ended.output}")
    if ended.exit is None:
        return CheckReport(lost=f"the fork server was lost\n{ended.output}".strip())
    if ended.exit.kind in {ExitKind.KILLED, ExitKind.KERNEL_OOM}:
        return CheckReport(lost=f"{ended.exit.kind.value} ({ended.exit.cause})")
    return CheckReport(error=f"{ended.exit.cause} while building it\n{ended.output}")


def result_of_dead_process(request: ProbeRequest, ended: Ended) -> ProbeResult:
    """The result of a probe whose process left none."""
    phase = ended.entered[-1][0] if ended.entered else Phase.START
    outcome, message = _judge_death(request, ended, phase)
    return ProbeResult(
        micro_batch_size=request.micro_batch_size,
        accumulates=request.accumulates,
        outcome=outcome,
        phase=phase,
        message=message,
        error_type=ended.exit.cause if ended.exit else None,
        traceback=None if outcome is Outcome.OOM else ended.output or None,
        limit_bytes=request.limit_bytes,
        measures_time=request.measures_time,
    )


def _judge_death(request: ProbeRequest, ended: Ended, phase: Phase) -> tuple[Outcome, str]:
    """The outcome of a probe whose process left none, and why."""
    if ended.timed_out:
        return Outcome.TIMED_OUT, f"did not end within {request.timeout_seconds:g} s; it was in phase {phase}"
    if ended.exit is None:
        return Outcome.LOST, f"the fork server ended during phase {phase}"
    match ended.exit.kind:
        case ExitKind.KERNEL_OOM:
            return Outcome.OOM, f"killed by the kernel for memory in phase {phase} ({ended.exit.cause})"
        case ExitKind.KILLED:
            return Outcome.LOST, f"ended from outside by {ended.exit.cause} in phase {phase}"
        case ExitKind.CRASHED:
            return Outcome.ERROR, f"the process crashed with {ended.exit.cause} in phase {phase}"
        case ExitKind.EXITED:
            return Outcome.ERROR, f"the process ended itself with {ended.exit.cause} in phase {phase}"
