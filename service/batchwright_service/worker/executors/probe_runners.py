"""A runner of probes for workloads that are described and for commands that the operator has registered."""

from __future__ import annotations

from collections.abc import Callable

from batchwright.planning.driver import ProbeRunner
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeaks, ProbeResult

_Stop = Callable[[], bool]


class ProbeRunners:
    """Give each request to the runner of its kind. A ``batchwright.planning.driver.ProbeRunner``, which owns both.

    Args:
        workloads: runs the probes of workloads.
        commands: runs the probes of commands.
        check_command: checks that a command is registered on this host; raises ``SpecError`` if not.
    """

    def __init__(
        self, workloads: ProbeRunner, commands: ProbeRunner, check_command: Callable[[CommandSpec], None]
    ) -> None:
        self._workloads = workloads
        self._commands = commands
        self._check_command = check_command

    def check(self, request: TuningRequest, should_stop: _Stop = lambda: False) -> None:
        """Check a spec before any probe.

        Raises:
            SpecError: also when a command is not registered on this host, or not so.
        """
        self._runner(request.spec).check(request, should_stop)

    def check_coupling(self, request: CouplingRequest, should_stop: _Stop = lambda: False) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts; commands have no such check."""
        return self._workloads.check_coupling(request, should_stop)

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Begin the estimate of a workload."""
        self._workloads.begin_estimate(request)

    def expect(self, request: ExpectationRequest, should_stop: _Stop = lambda: False) -> ExpectedPeaks | None:
        """Estimate the peaks of a workload; commands have no estimate."""
        return self._workloads.expect(request, should_stop)

    def late_estimate(self) -> ExpectedPeaks | None:
        """Return the estimate that ``expect`` did not wait for."""
        return self._workloads.late_estimate()

    def end_search(self) -> None:
        """End the estimate of a workload that ``expect`` did not wait for, and the fork server of a command."""
        self._workloads.end_search()
        self._commands.end_search()

    def run(self, request: ProbeRequest, should_stop: _Stop = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            SpecError: when a command is not registered on this host, or not so; a link may have changed since the last.
        """
        return self._runner(request.spec).run(request, should_stop)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of probes of workloads; those of commands follow from them."""
        return self._workloads.environment()

    def close(self) -> None:
        """End every process. Idempotent."""
        self._workloads.close()
        self._commands.close()

    def _runner(self, spec: object) -> ProbeRunner:
        if not isinstance(spec, CommandSpec):
            return self._workloads
        self._check_command(spec)
        return self._commands
