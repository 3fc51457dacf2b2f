"""Turn the end of a command's job into its result: what it made, why it ended, and what to do about it. No torch."""

import signal
from dataclasses import dataclass

from batchwright.commands.job_progress import JobReports
from batchwright.commands.reports import Event
from batchwright.commands.templates import Figures
from batchwright.hardware.failures import FailureKind, oom_in_words, printed_error
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright.system.process_exit import ExitKind, classify_exit
from batchwright.units import counted, format_bytes, format_use

_OUT_OF_MEMORY = "out-of-memory"
_REMEDY = (
    "The probes saw no such update: the samples may be longer than the probes' samples. Tune with more "
    "--probe-updates, with the program's flag for its longest samples as --probe-argument, or with a larger "
    "--memory-margin"
)


@dataclass(frozen=True)
class EndedJob:
    """A job of a command that has ended, with everything that is known of it."""

    figures: Figures
    recommendation: Recommendation
    reports: JobReports
    exit_status: int | None
    """Exit status of the command, negative for a signal; None where it was killed, or its subreaper was."""
    start_error: str | None
    """Why the command could not be started."""
    stopped_by: signal.Signals | None
    """The signal that the job was asked to end with."""
    is_killed: bool
    """True if the tree was killed, at the end of the grace or with the caller."""
    kernel_oom_kills: int
    output: str
    seconds: float

    @property
    def limit_bytes(self) -> int | None:
        """The limit of the recommendation."""
        return self.recommendation.headroom.limit_bytes if self.recommendation.headroom else None


def result_of_job(ended: EndedJob) -> TrainingResult:
    """The result of a job of a command."""
    outcome, error_type, message = _outcome(ended)
    progress = ended.reports.progress
    return TrainingResult(
        outcome=outcome,
        message=message,
        error_type=error_type,
        exit_status=ended.exit_status,
        output=ended.output,
        updates=progress.update,
        samples_seen=progress.samples_seen,
        peak_bytes=progress.peak_bytes,
        limit_bytes=ended.limit_bytes,
        out_of_memory=error_type == _OUT_OF_MEMORY,
        notes=tuple(_notes(ended, outcome)),
        seconds=ended.seconds,
    )


_Verdict = tuple[RunOutcome, str | None, str]
"""Outcome, `error_type` and message."""


def _outcome(ended: EndedJob) -> _Verdict:  # noqa: PLR0911 - one per ending
    samples = f" ({ended.reports.progress.samples_seen:,} samples)" if ended.reports.progress.samples_seen else ""
    made = counted(ended.reports.progress.update, "update") + samples
    if ended.start_error is not None:
        return RunOutcome.FAILED, "not-started", f"the command could not be started: {ended.start_error}"
    progress = ended.reports.progress
    # A command that was to stop may have made all of its updates, and ended by itself.
    has_made_all = ended.exit_status == 0 and progress.updates is not None and progress.update >= progress.updates
    if ended.stopped_by is not None and not has_made_all:
        how = "and had to be killed" if ended.is_killed else _cause(ended)
        return RunOutcome.STOPPED, None, f"the command was stopped by {ended.stopped_by.name} after {made}, {how}"
    if ended.is_killed:
        return RunOutcome.STOPPED, None, f"the command was killed after {made}, because its caller ended"
    if ended.exit_status is None:
        return RunOutcome.FAILED, "lost", f"the process that keeps the command was killed after {made}"
    if ended.exit_status == 0:
        return RunOutcome.SUCCEEDED, None, f"the command ended with exit status 0 after {made}"
    if (oom := _oom(ended)) is not None:
        return RunOutcome.FAILED, _OUT_OF_MEMORY, f"{oom} ({_cause(ended)}) after {made}. {_figures(ended)}"
    return _failed(ended, made)


def _cause(ended: EndedJob) -> str:
    """The way in which the process of the command ended."""
    if ended.exit_status is None:
        return "and was lost"
    return f"and ended with {classify_exit(ended.exit_status, ended.kernel_oom_kills).cause}"


def _failed(ended: EndedJob, made: str) -> _Verdict:
    end = classify_exit(ended.exit_status or 0, ended.kernel_oom_kills)
    last, _ = printed_error(ended.output)
    said = f": {last}" if last else ""
    if end.kind is ExitKind.KILLED:
        return RunOutcome.FAILED, end.cause, f"the command was ended from outside by {end.cause} after {made}"
    return RunOutcome.FAILED, end.cause, f"the command ended with {end.cause} after {made}{said}"


def _oom(ended: EndedJob) -> str | None:
    """Describe the lack of memory that ended the command; None where nothing shows one."""
    if ended.kernel_oom_kills:
        return "the kernel killed a process of the command for memory"
    if ended.reports.ooms:
        return _describe(ended.reports.ooms[-1])
    last, kind = printed_error(ended.output)
    if kind is FailureKind.OUT_OF_MEMORY:
        return f"the command ran out of memory, by its output: {oom_in_words(last)}"
    return None


def _describe(event: Event) -> str:
    message = str(event["message"]) or str(event["type"])
    where = f"in update {event['updates'] + 1} on rank {event['rank']}"
    return f"the command ran out of memory {where}: {oom_in_words(message)}"


def _figures(ended: EndedJob) -> str:
    figures, peak = ended.figures, ended.reports.progress.peak_bytes
    ranks = f" on each of {figures.world_size} ranks" if figures.world_size > 1 else ""
    plan = f"{figures.accumulation_steps} x {figures.micro_batch_size} samples{ranks}: {figures.effective_batch_size}"
    held = "" if peak is None else f"; the peak was {format_use(peak, ended.limit_bytes)}"
    return f"The plan was {plan}{held}. {_REMEDY}"


def _notes(ended: EndedJob, outcome: RunOutcome) -> list[str]:
    progress, notes = ended.reports.progress, list[str]()
    peak, limit = progress.peak_bytes, ended.limit_bytes
    if peak is not None and limit is not None and peak > limit:
        notes.append(f"the peak of {format_bytes(peak)} is above the limit of {format_bytes(limit)}")
    if outcome is RunOutcome.SUCCEEDED and ended.reports.ooms:
        notes.append(
            f"{_describe(ended.reports.ooms[0])}. The program caught the error, and may not have followed the "
            "plan since"
        )
    command = ended.recommendation.request.command
    if progress.unlike_plan and command is not None and command.model.takes_accumulation:
        notes.append(
            f"{progress.unlike_plan} of {progress.update} updates had micro-batches unlike the plan's; the "
            "last update of an epoch may differ"
        )
    if progress.update and progress.world_size != ended.figures.world_size:
        notes.append(f"{counted(progress.world_size, 'rank')} trained, but the plan has {ended.figures.world_size}")
    if outcome is RunOutcome.SUCCEEDED and not progress.update:
        what = "no update of it was counted" if ended.reports.has_torch else "no process of it imported torch"
        notes.append(f"{what}, so its updates and its peak are unknown")
    return notes
