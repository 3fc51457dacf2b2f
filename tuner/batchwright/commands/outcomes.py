"""Turn the end of a command into the result of its probe: an outcome, a message of its own, and evidence. No torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from batchwright.commands.counted_updates import judge_updates
from batchwright.commands.reports import Event, ReportedProcess, Reports
from batchwright.commands.templates import Figures
from batchwright.hardware.failures import FailureKind, classify_printed, oom_in_words, printed_error
from batchwright.planning.accumulation import probe_window
from batchwright.planning.proofs.counted_plans import own_steps
from batchwright.schemas.command import CommandModel
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import (
    ERRORS_OF_IMPORTS,
    NEARLY_FULL,
    NO_OPTIMIZER,
    PLAN_NOT_FOLLOWED,
    CountedUpdates,
    Outcome,
    Phase,
    PhaseSeconds,
    ProbeResult,
    UpdateTiming,
)
from batchwright.system.process_exit import ExitKind, ProcessExit
from batchwright.units import format_bytes

_MESSAGE_LENGTH = 2000
_OUTPUT_LENGTH = 8000
_KILLED = ("(SIGKILL)", "(SIGTERM)")
_CRASHED = ("(SIGSEGV)", "(SIGBUS)", "(SIGABRT)", "(SIGILL)", "(SIGFPE)")
"""Signals of a rank in the output of torch's launcher, whose own exit status is 1."""

_PHASES = {
    Phase.START: "before torch was imported",
    Phase.BUILD: "before training",
    Phase.WARMUP: "in the first update",
    Phase.MEASURE: "after the first update",
    Phase.DONE: "after the last update",
}


class EndReason(Enum):
    """Reasons for the end of a command."""

    FINISHED = "every rank made the updates"
    OOM = "a process ran out of memory"
    NEVER_STEPS = "backward passes without a step"
    NO_BACKWARD = "steps without a backward pass"
    LOADING_TIMED_OUT = "no forward pass in time"
    TIMED_OUT = "not enough updates in time"
    BY_ITSELF = "the command ended"


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended, with everything that is known of it."""

    request: ProbeRequest
    model: CommandModel
    figures: Figures
    updates: int
    ending: EndReason
    reports: Reports
    requested_at: float
    """Start of the probe on the monotonic clock, in seconds."""
    ended_at: float
    exit: ProcessExit | None
    """Exit of the command itself; None where it was ended, or its subreaper was lost."""
    start_error: str | None
    """Why the command could not be started."""
    kernel_oom_kills: int
    output: str
    """The end of its output."""
    stacks: str
    """The stacks of its processes, where it was too slow."""
    unreached: Sequence[str]
    """Command lines of Python processes that reported nothing."""
    other_processes_bytes: int | None
    forked: bool
    """True if the fork server of the command started it."""
    is_of_plan: bool
    """True if the figures are those of a plan."""

    @property
    def phase(self) -> Phase:
        """The phase that the command reached."""
        if self.ending is EndReason.FINISHED:
            return Phase.DONE
        if self.reports.trained:
            return Phase.MEASURE
        if self.reports.forward_at is not None:
            return Phase.WARMUP
        return Phase.BUILD if self.reports.with_torch else Phase.START

    @property
    def crashed(self) -> bool:
        """True if a process crashed, for which a lack of memory may be the reason."""
        if self.ending is not EndReason.BY_ITSELF or self.exit is None:
            return False
        return self.exit.kind is ExitKind.CRASHED or any(name in self.output for name in _CRASHED)


def is_oom(event: Event) -> bool:
    """Return whether a reported exception is an OOM, by the rules for all exceptions."""
    match classify_printed(f"{event['type']}: {event['message']}"):
        case FailureKind.OUT_OF_MEMORY:
            return True
        case FailureKind.SUSPECTED_OUT_OF_MEMORY:
            return bool(event.get("limit_bytes")) and _peak_of(event) >= NEARLY_FULL * event["limit_bytes"]
        case _:
            return False


def _peak_of(event: Event) -> int:
    """The peak of the memory that the limit bounds, in bytes."""
    return int(event.get("reserved_bytes") or event.get("process_peak_bytes") or 0)


def result_of(ended: EndedCommand) -> ProbeResult:
    """The result of a probe of a command."""
    counted = judge_updates(ended.reports, ended.figures, ended.model, of_plan=ended.is_of_plan)
    outcome, error_type, message, details = _outcome(ended, counted)
    request = ended.request
    return ProbeResult(
        micro_batch_size=request.micro_batch_size,
        accumulates=request.accumulates,
        micro_batch_sizes=probe_window(request),
        outcome=outcome,
        phase=ended.phase,
        message=message[:_MESSAGE_LENGTH],
        details=details[:_MESSAGE_LENGTH] if details else None,
        error_type=error_type,
        traceback=_traceback(ended, outcome),
        **_peaks(ended),
        seconds=_phase_seconds(ended),
        measures_time=request.measures_time,
        verifies_plan=request.runs_plan,
        forked=ended.forked,
        timing=_timing(ended, counted) if outcome is Outcome.FIT else None,
        counted=counted,
        files=ended.reports.files,
    )


_Verdict = tuple[Outcome, str | None, str, str | None]
"""Outcome, `error_type`, message and details."""


def _outcome(ended: EndedCommand, counted: CountedUpdates | None) -> _Verdict:  # noqa: PLR0911 - one per ending
    where, reports, request = _PHASES[ended.phase], ended.reports, ended.request
    if ended.kernel_oom_kills and ended.ending is not EndReason.FINISHED:
        return Outcome.OOM, "SIGKILL", f"killed by the kernel for memory {where}", None
    match ended.ending:
        case EndReason.OOM:
            return _oom(ended, where)
        case EndReason.FINISHED:
            return _finished(ended, counted)
        case EndReason.NEVER_STEPS:
            error_type = "never-steps"
            why = (
                f"an update has {ended.figures.accumulation_steps}: the command ignores its accumulation, or has a "
                "torch.optim.Optimizer that it does not step"
            )
            if not reports.has_optimizer:
                error_type = NO_OPTIMIZER
                why = "the command has none, and no parameter changed between them: no training was seen"
            passes = f"{reports.waiting_passes} backward passes were counted"
            return Outcome.ERROR, error_type, f"{passes} without a step of a torch.optim.Optimizer, and {why}", None
        case EndReason.NO_BACKWARD:
            message = f"{ended.updates} optimizer steps were counted without a backward pass: no training was seen"
            return Outcome.ERROR, "no-backward", message, None
        case EndReason.LOADING_TIMED_OUT:
            time_limit = f"within {ended.model.loading_timeout_seconds:g} s (loading_timeout_seconds)"
            return (
                Outcome.TIMED_OUT,
                "loading-timed-out",
                f"no forward pass was seen {time_limit}; it was {where}",
                None,
            )
        case EndReason.TIMED_OUT:
            fewest = min((len(process.updates) for process in reports.trained), default=0)
            silent = reports.world_size - len(reports.finished)
            hanging = f"; {silent} of {reports.world_size} ranks did not make them" if reports.world_size > 1 else ""
            message = (
                f"made {fewest} of {ended.updates} updates within {request.timeout_seconds:g} s of its first forward "
                f"pass{hanging}"
            )
            return Outcome.TIMED_OUT, "timed-out", message, None
        case EndReason.BY_ITSELF:
            return _ended_by_itself(ended, where)


def _finished(ended: EndedCommand, counted: CountedUpdates | None) -> _Verdict:
    if counted is not None and counted.as_planned is False:
        return Outcome.ERROR, PLAN_NOT_FOLLOWED, f"{counted.statement}", None
    if (excess := _excess(ended)) is not None:
        return Outcome.OOM, "peak-above-limit", excess, None
    made = f"{_made_updates(ended)} ran within the limit"
    return Outcome.FIT, None, f"{made}: {counted.statement}" if counted else made, None


def _excess(ended: EndedCommand) -> str | None:
    """Describe a measured peak above the limit; None where every rank stayed within it.

    The limit holds in a process that trains from its start on, and has no such peak. The program may lift it, a process
    that a program starts for its own ends has it from the first sign of training on, and near it the last micro-batch
    runs without it.
    """
    for process in ended.reports.finished:
        done = process.done or {}
        peak, limit = _peak_of(done), done.get("limit_bytes")
        if limit is not None and peak > limit:
            held = f"held {format_bytes(peak)}, above the limit of {format_bytes(limit)}"
            if done["was_tried"]:
                return f"{held}, in a micro-batch without it: a library takes less where an allocation fails"
            return f"{held}, which the program lifted or its process did not have from the start"
    return None


def _made_updates(ended: EndedCommand) -> str:
    """Name the updates that every rank made, of which the last may only have begun."""
    whole = min(len(process.updates) for process in ended.reports.finished)
    if whole >= ended.updates:
        return f"{whole} optimizer updates"
    return f"{whole} optimizer update{'' if whole == 1 else 's'} and the beginning of the next"


def _oom(ended: EndedCommand, where: str) -> _Verdict:
    found = ended.reports.oom
    if found is None:
        return Outcome.ERROR, None, f"ended {where}", None
    _, event = found
    message = str(event["message"]) or str(event["type"])
    rank = f" on rank {event['rank']}" if ended.figures.world_size > 1 or ended.reports.world_size > 1 else ""
    if event["evaluation"] is not None and ended.phase is Phase.BUILD:
        where = f"{event['evaluation']} a forward pass without gradients, {where}"
    return Outcome.OOM, str(event["type"]), f"{oom_in_words(message)}{rank} {where}", message


def _ended_by_itself(ended: EndedCommand, where: str) -> _Verdict:
    if ended.start_error is not None:
        return Outcome.ERROR, "not-started", f"the command could not be started: {ended.start_error}", None
    if ended.exit is None:
        return Outcome.LOST, None, f"the process that keeps the command was lost {where}", None
    kind, cause = ended.exit.kind, ended.exit.cause
    if kind is ExitKind.KILLED:
        return Outcome.LOST, cause, f"ended from outside by {cause} {where}", None
    if cause != "exit status 0":
        return _failed(ended, where, cause)
    error_type, message = _ended_early(ended)
    return Outcome.ERROR, error_type, message, None


def _failed(ended: EndedCommand, where: str, cause: str) -> _Verdict:
    """The verdict on a command that failed: its output may say why."""
    last, kind = printed_error(ended.output)
    match kind:
        case FailureKind.OUT_OF_MEMORY:
            return Outcome.OOM, cause, f"{oom_in_words(last)} {where}, by its output", last
        case FailureKind.SUSPECTED_OUT_OF_MEMORY if _is_nearly_full(ended):
            return Outcome.OOM, cause, f"ended with {cause} {where} near the limit: {last}", last
        case FailureKind.INVALID_SIZE:
            return Outcome.INVALID_SIZE, cause, f"the size is illegal for a kernel, {where}: {last}", None
    if not ended.crashed and any(name in ended.output for name in _KILLED):
        return Outcome.LOST, cause, f"a rank was ended from outside {where} ({cause})", None
    if not ended.reports.processes and ended.unreached:
        return Outcome.ERROR, *_not_reached(ended, cause), None
    error_type = next((name for name in ERRORS_OF_IMPORTS if last.startswith(f"{name}:")), cause)
    message = f"ended with {cause} {where}: {last}" if last else f"ended with {cause} {where}"
    return Outcome.ERROR, error_type, message, None


def _is_nearly_full(ended: EndedCommand) -> bool:
    """Return whether a process held nearly all of the limit when it ended."""
    ends = [process.exit for process in ended.reports.processes if process.exit and process.exit.get("limit_bytes")]
    return any(_peak_of(event) >= NEARLY_FULL * event["limit_bytes"] for event in ends)


def _ended_early(ended: EndedCommand) -> tuple[str, str]:  # noqa: PLR0911 - one per way to end
    """Explain a command that ended without an error and without the wanted updates."""
    reports, wanted = ended.reports, ended.updates
    if reports.trained:
        made = min(len(process.updates) for process in reports.trained)
        return "ended-early", (
            f"ended by itself after {made} of {wanted} updates: give it more data or more updates in probes "
            f"(`{{updates}}` is the number that they need)"
        )
    if reports.waiting_passes:
        return "never-steps", (
            f"ended by itself after {reports.waiting_passes} backward passes without an update: no "
            "torch.optim.Optimizer made a step, and no parameter changed between them"
        )
    if any(process.idle_steps for process in reports.processes):
        return "no-backward", "ended by itself after optimizer steps without a backward pass: no training was seen"
    if reports.with_torch:
        return "ended-early", "ended by itself without a backward pass: it imported torch, but trained nothing"
    if ended.unreached:
        return _not_reached(ended, "exit status 0")
    if reports.processes:
        return "no-torch", "ended by itself, and no process of it imported torch: only training with torch is counted"
    return "no-python", "ended by itself without starting Python: only training in Python processes is counted"


def _not_reached(ended: EndedCommand, cause: str) -> tuple[str, str]:
    return "not-reached", (
        f"ended with {cause}, and its Python was not reached: `{ended.unreached[0]}` reported nothing. Start Python "
        "without -I, -E and -S, and keep PYTHONPATH in its environment"
    )


def _traceback(ended: EndedCommand, outcome: Outcome) -> str | None:
    if outcome is Outcome.TIMED_OUT:
        return "\n".join(part for part in (ended.stacks, ended.output[-_OUTPUT_LENGTH:]) if part) or None
    if outcome in {Outcome.ERROR, Outcome.LOST} and ended.ending is not EndReason.FINISHED:
        return ended.output[-_OUTPUT_LENGTH:] or None
    return None


def _peaks(ended: EndedCommand) -> dict[str, int | None]:
    """The peaks of the rank with the most memory."""
    done = [process.done for process in ended.reports.finished if process.done]
    ooms = [event for process in ended.reports.processes for event in process.ooms]
    ends = [process.exit for process in ended.reports.processes if process.exit]
    events: list[Event] = done or ooms or ends
    if not events:
        return {"limit_bytes": ended.request.limit_bytes}
    held = max(events, key=_peak_of)
    return {
        "peak_allocated_bytes": held.get("allocated_bytes"),
        "peak_reserved_bytes": held.get("reserved_bytes"),
        "process_peak_bytes": held.get("process_peak_bytes"),
        "resident_bytes": held.get("resident_bytes"),
        "allocator_retries": held.get("allocator_retries"),
        "context_bytes": held.get("context_bytes"),
        "limit_bytes": held.get("limit_bytes") or ended.request.limit_bytes,
        "other_processes_bytes": ended.other_processes_bytes,
    }


def _phase_seconds(ended: EndedCommand) -> PhaseSeconds:
    """The seconds of each phase, of the rank that entered each first."""
    reports, began = ended.reports, ended.requested_at
    torch_at = min((process.torch_at for process in reports.processes if process.torch_at), default=None)
    ends = [event["ended_at"] for process in reports.trained[:1] for event in process.updates]
    marks = [began, torch_at, reports.forward_at, ends[0] if ends else None, ends[-1] if ends else None]
    reached = [mark for mark in marks if mark is not None]
    if len(reached) < len(marks):
        reached.append(ended.ended_at)
    spent = [max(0.0, later - earlier) for earlier, later in pairwise(reached)]
    names = ("start", "build", "warmup", "measure")
    return PhaseSeconds(**dict(zip(names, spent, strict=False)), total=max(0.0, ended.ended_at - began))


def _timing(ended: EndedCommand, counted: CountedUpdates | None) -> UpdateTiming | None:
    """The duration of an update, of the slowest rank."""
    steps = ended.figures.accumulation_steps
    if counted is not None and not ended.model.takes_accumulation:
        steps = own_steps(counted.ranks[0], ended.request.micro_batch_size)
    found = (_rank_timing(process, ended, steps) for process in ended.reports.finished)
    timings = [timing for timing in found if timing is not None]
    return max(timings, key=lambda timing: timing.update_seconds, default=None)


def _rank_timing(process: ReportedProcess, ended: EndedCommand, steps: int) -> UpdateTiming | None:
    first = process.updates[0]["optimizer_number"] if process.updates else None
    own = [event for event in process.updates if event["optimizer_number"] == first]
    ends = [event["ended_at"] for event in own]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    done = process.done or {}
    if not seconds and ended.request.counts_plan and done.get("update_seconds"):
        seconds = [done["update_seconds"]]  # of the first update, without what its first micro-batch takes longer
    if not seconds:
        return None
    median = statistics.median(seconds)
    deviation = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    return UpdateTiming(
        updates=len(seconds),
        micro_batch_sizes=(ended.request.micro_batch_size,) * steps,
        update_seconds=median,
        micro_batch_seconds=done.get("micro_batch_seconds") if steps > 1 else None,
        noise=deviation / median / len(seconds) ** 0.5 if median else 0.0,
    )
