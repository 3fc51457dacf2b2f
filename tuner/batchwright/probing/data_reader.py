"""Read the data of a spec before the first probe, in a process that may crash or hang. No torch."""

import time
from collections.abc import Callable

from batchwright.errors import CheckLostError, FieldProblem, HostFailureError, HubUnavailableError, SpecError
from batchwright.probing.exit_causes import EndedTask
from batchwright.probing.protocol import DataReport, DataRequest, ProbePaths
from batchwright.schemas.recommendation import DataReading
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.process_exit import ExitKind
from batchwright.system.reading_progress import ReadingProgress

_SECONDS = 60.0
"""Time after which the reading ends with a sample of the data."""
_SECONDS_OF_SAMPLE = 20.0
"""Time limit of one sample, which takes milliseconds."""
_LONGEST_SECONDS = 300.0
"""Time limit of the process, for opening files and for the steps that are under way when the time is up."""
_MAX_ATTEMPTS = 2
"""Attempts at a reading that is killed from outside, as of any task."""


RunReading = Callable[[DataRequest, float, Callable[[], bool], Callable[[ProbePaths], bool]], EndedTask]
"""Runs the process that reads: for a request, to its end or for so many seconds, until it is to stop, or is stuck."""


class DataReader:
    """One reading of the data of a spec, which reports how many samples it has read, and of how many."""

    def __init__(
        self,
        spec: WorkloadSpec,
        run: RunReading,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._spec = spec
        self._run = run
        self._should_stop = should_stop
        self._on_progress = on_progress
        self._latest = ReadingProgress()
        self._since = 0.0

    def read(self) -> DataReading:
        """Read, with the errors of ``batchwright.driving.probe_runner.WorkloadRunner.read_data``."""
        ended = self._ended()
        report = ended.document(DataReport)
        if report is None:
            return self._of_dead_process(ended)
        if report.host_failure is not None:
            cause, _, message = report.host_failure.partition(": ")
            raise HostFailureError(cause, message)
        if report.unavailable:
            raise HubUnavailableError(list(report.unavailable))
        if report.reading is None:
            raise SpecError(list(report.problems))
        return report.reading

    def _ended(self, named: int | None = None) -> EndedTask:
        """Run the process, and again where it was killed from outside."""
        for _ in range(_MAX_ATTEMPTS):
            request = DataRequest(spec=self._spec, seconds=_SECONDS, named=named)
            ended = self._run(request, _LONGEST_SECONDS, self._should_stop, self._is_stuck)
            if not ended.was_lost:
                return ended
        raise CheckLostError(
            f"the process that reads the data was killed {_MAX_ATTEMPTS} times. Check the memory of the host and the "
            "kernel's log, then submit it again"
        )

    def _is_stuck(self, paths: ProbePaths) -> bool:
        """Return whether one sample takes too long, and report progress."""
        now = ReadingProgress.of(paths.progress)
        if now != self._latest:
            self._latest, self._since = now, time.monotonic()
            self._on_progress(now.read, now.total)
        # Files are opened before the first sample, which may take long: only the whole process bounds that.
        return now.sample >= 0 and time.monotonic() > self._since + _SECONDS_OF_SAMPLE

    def _of_dead_process(self, ended: EndedTask) -> DataReading:
        """The error of a process that left no report; what it had read if opening the files took too long."""
        number, read, total = ended.progress
        if number < 0 and ended.timed_out:
            return DataReading(read=read, total=total or None, seconds=_LONGEST_SECONDS)
        if ended.timed_out:
            cause = f"took more than {_SECONDS_OF_SAMPLE:g} s"
        elif ended.exit is not None and ended.exit.kind is ExitKind.KERNEL_OOM:
            cause = "took more memory than the host has"
        else:
            cause = f"ended its process with {ended.exit.cause}" if ended.exit else "ended its process"
        place = ended.output.strip().rpartition("\n")[2]
        if number >= 0:
            report = self._ended(number).document(DataReport)
            place = (report and report.place) or f"sample {number + 1}"
        raise SpecError([FieldProblem("data", f"cannot be read: {cause}", place)])
