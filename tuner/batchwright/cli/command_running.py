"""Run the job of a command from a terminal: its output as it comes, and lines of progress on standard error."""

import signal
import sys
import time
from codecs import getincrementaldecoder
from pathlib import Path
from typing import TextIO

from rich.console import Console

from batchwright.cli.display import progress_console
from batchwright.cli.ending_signals import SignalsAsInterrupt
from batchwright.cli.errors import ExitCode
from batchwright.cli.output import print_run
from batchwright.commands.command_job import CommandJob
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.training import CommandProgress, RunOutcome, TrainingResult
from batchwright.units import format_bytes, format_use

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0
"""Grace period of a stopped command, to write its checkpoint."""
_LINES = 10
"""Lines of progress of a command whose number of updates is known."""


def train_command(found: Recommendation, updates: int, directory: Path, *, as_document: bool) -> None:
    """Run the command of a recommendation with the figures of its plan, and print the result.

    Its output goes to standard output, or to standard error where that has the result as a document.

    Raises:
        typer.Exit: with the exit code of a run that failed or was stopped.
    """
    stream = sys.stderr if as_document else sys.stdout
    with SignalsAsInterrupt() as signals, CommandJob(directory) as job:
        job.start(found, updates)
        shown = _ShownJob(job, found, stream, progress_console())
        try:
            result = shown.follow()
        except KeyboardInterrupt:
            number = signal.SIGINT if signals.exit_code is ExitCode.INTERRUPTED else signal.SIGTERM
            shown.print(f"{number.name} was passed on to the command, which has {_STOP_SECONDS:.0f} s to end")
            job.request_stop(number)
            result = shown.follow(time.monotonic() + _STOP_SECONDS)
    text = describe_command_result(result, directory)
    print_run(result, as_document=as_document, text=text, stopped=signals.exit_code)


class _ShownJob:
    """A job that has been started: shows its output on ``stream`` and its progress on ``console`` until it ends."""

    def __init__(self, job: CommandJob, found: Recommendation, stream: TextIO, console: Console) -> None:
        self._job, self._stream, self._console = job, stream, console
        self._limit_bytes = found.headroom.limit_bytes if found.headroom else None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._next_mark = 1
        self._has_warned = False

    def follow(self, deadline: float | None = None) -> TrainingResult:
        """Show the job until it ends, and kill it at the deadline, if there is one."""
        while True:
            result = self._job.poll()
            while block := self._job.new_output():
                self._stream.write(self._decoder.decode(block))
                self._stream.flush()
            self._show_progress(self._job.progress)
            if result is not None:
                return result
            if deadline is not None and time.monotonic() > deadline:
                self._job.kill()
            time.sleep(_POLL_SECONDS)

    def _show_progress(self, progress: CommandProgress) -> None:
        if progress.update >= self._next_mark:
            self._next_mark = _mark_after(progress.update, progress.updates)
            self.print(describe_command_progress(progress, self._limit_bytes))
        if self._job.is_above_limit and not self._has_warned:
            self._has_warned = True
            held, limit = format_bytes(progress.peak_bytes or 0), format_bytes(self._limit_bytes or 0)
            self.print(f"warning: the peak of {held} is above the limit of {limit}; the command runs on")

    def print(self, line: str) -> None:
        """Print a line beside the output of the command."""
        self._console.print(f"batchwright: {line}", markup=False, soft_wrap=True)


def _mark_after(updates: int, total: int | None) -> int:
    """The number of updates at which the next line is printed: a tenth more, or the next of 1, 2, 5, 10, 20 ..."""
    if total is not None:
        every = max(1, total // _LINES)
        return (updates // every + 1) * every
    power = 1
    while True:
        for mark in (power, 2 * power, 5 * power):
            if mark > updates:
                return mark
        power *= 10


def describe_command_progress(progress: CommandProgress, limit_bytes: int | None) -> str:
    """Describe the progress of a command: `update 50/100  9.7 samples/s  peak 310 MiB of 400 MiB`."""
    of = "" if progress.updates is None else f"/{progress.updates:,}"
    parts = [f"update {progress.update:,}{of}"]
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.1f} samples/s")
    if progress.peak_bytes is not None:
        parts.append(f"peak {format_use(progress.peak_bytes, limit_bytes)}")
    return "  ".join(parts)


def describe_command_result(result: TrainingResult, directory: Path) -> str:
    """Describe the result of a job: outcome, peak, notes, and the folder of its files."""
    is_known = result.peak_bytes is not None and result.outcome is not RunOutcome.FAILED
    held = f", peak {format_use(result.peak_bytes or 0, result.limit_bytes)}" if is_known else ""
    notes = "".join(f"\nNote: {note}" for note in result.notes)
    return f"{result.outcome.value}: {result.message}{held}. Output and files in {directory}.{notes}"
