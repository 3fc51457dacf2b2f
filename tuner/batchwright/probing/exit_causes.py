"""Results of tasks whose process left none: of probes, checks of a spec, and coupling checks."""

from dataclasses import dataclass

from pydantic import ValidationError

from batchwright.hardware.failures import FailureKind, oom_in_words, printed_error
from batchwright.planning.accumulation import probe_window
from batchwright.probing.protocol import CheckReport
from batchwright.schemas.base import DocumentT
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, ProbeRequest
from batchwright.schemas.results import Outcome, Phase, ProbeResult
from batchwright.system.process_exit import ExitKind, ProcessExit
from batchwright.system.reading_progress import ReadingProgress


@dataclass(frozen=True)
class EndedTask:
    """A task whose process has ended, with the files that it left."""

    exit: ProcessExit | None
    """None when the fork server itself was lost."""
    timed_out: bool
    requested_at: float
    """When the task was sent to the server, on the monotonic clock."""
    ended_at: float
    """When the task's end was noticed, on the monotonic clock."""
    output: str
    """The end of the task's output, or of the fork server's if the server was lost."""
    result: bytes | None
    """The document that the task left."""
    phases: list[tuple[Phase, float]]
    """The phases that the task entered, with their times."""
    progress: ReadingProgress
    """How far a reading of data had come."""

    def document(self, kind: type[DocumentT]) -> DocumentT | None:
        """Parse the document that the task left; None if it is missing or invalid."""
        try:
            return None if self.result is None else kind.model_validate_json(self.result)
        except ValidationError:
            return None

    @property
    def was_lost(self) -> bool:
        """True when the process or the fork server was killed from outside, so that the task is not to blame."""
        return not self.timed_out and (self.exit is None or self.exit.kind is ExitKind.KILLED)


def coupling_check_of_dead_process(request: CouplingRequest, ended: EndedTask) -> CouplingCheck:
    """Build the outcome of a coupling check whose process left none."""
    cause = f"ended with {ended.exit.cause}" if ended.exit else "was lost"
    cause = f"did not end within {request.timeout_seconds:g} s" if ended.timed_out else cause
    return CouplingCheck(verdict="not-compared", message=f"the check {cause}.")


def check_report_of_dead_process(ended: EndedTask, timeout_seconds: float) -> CheckReport:
    """Build the report of a spec check whose process left none. A crash or an exit is the workload's fault."""
    if ended.timed_out:
        return CheckReport(error=f"the model was not built within {timeout_seconds:g} s\n{ended.output}")
    if ended.exit is None:
        return CheckReport(lost=f"the fork server was lost\n{ended.output}".strip())
    if ended.exit.kind in {ExitKind.KILLED, ExitKind.KERNEL_OOM}:
        return CheckReport(lost=f"{ended.exit.kind.value} ({ended.exit.cause})")
    return CheckReport(error=f"{ended.exit.cause} while building the model\n{ended.output}")


_DOING = {
    Phase.START: "starting",
    Phase.BUILD: "building the model",
    Phase.WARMUP: "warming up",
    Phase.MEASURE: "running its measured update",
    Phase.DONE: "ending",
}


def probe_result_of_dead_process(request: ProbeRequest, ended: EndedTask) -> ProbeResult:
    """Build the result of a probe whose process left none."""
    phase = ended.phases[-1][0] if ended.phases else Phase.START
    outcome, message = _outcome_of_exit(request, ended, phase)
    return ProbeResult(
        micro_batch_size=request.micro_batch_size,
        accumulates=request.accumulates,
        micro_batch_sizes=probe_window(request),
        outcome=outcome,
        phase=phase,
        message=message,
        error_type=ended.exit.cause if ended.exit else None,
        traceback=None if outcome is Outcome.OOM else ended.output or None,
        limit_bytes=request.limit_bytes,
        measures_time=request.measures_time,
        brackets=request.brackets,
    )


def _outcome_of_exit(  # noqa: PLR0911 - one per ending
    request: ProbeRequest, ended: EndedTask, phase: Phase
) -> tuple[Outcome, str]:
    """Return the outcome of a probe whose process left none, with the reason."""
    if ended.timed_out:
        return Outcome.TIMED_OUT, f"it was still {_DOING[phase]}, and its limit is {request.timeout_seconds:g} s"
    if ended.exit is None:
        return Outcome.LOST, f"the fork server ended during phase {phase}"
    line, kind = printed_error(ended.output)
    match ended.exit.kind:
        case ExitKind.KERNEL_OOM:
            return Outcome.OOM, f"killed by the kernel for memory in phase {phase} ({ended.exit.cause})"
        case ExitKind.KILLED:
            return Outcome.LOST, f"ended from outside by {ended.exit.cause} in phase {phase}"
        case _ if kind is FailureKind.OUT_OF_MEMORY:
            return Outcome.OOM, f"{oom_in_words(line)} in phase {phase}, by its output ({ended.exit.cause})"
        case ExitKind.CRASHED:
            return Outcome.ERROR, f"the process crashed with {ended.exit.cause} in phase {phase}"
        case ExitKind.EXITED:
            return Outcome.ERROR, f"the process ended itself with {ended.exit.cause} in phase {phase}"
