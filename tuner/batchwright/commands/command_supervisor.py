"""Run the probes of a command, forked from a server of it where that proves as much as a fresh process. No torch."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from batchwright.commands.command_probe import CommandProbe
from batchwright.commands.fork_servers import CommandForkServer, NotForkedError
from batchwright.commands.launching import FreshCommand, Launcher, may_serve
from batchwright.commands.outcomes import result_of
from batchwright.commands.templates import check_command, find_program
from batchwright.errors import ProbeError
from batchwright.hardware.crashes import run_explaining_crashes
from batchwright.schemas.command import CommandModel, CommandSpec
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult, SharedImports
from batchwright.system.disk_space import translate_full_disk
from batchwright.system.temporary_folders import TemporaryFolder

_FORKED_SHARE, _FORKED_BYTES = 0.01, 4 * 1024**2
"""Difference that the peaks of a forked and of a fresh process may have: this share of the limit, and at least these
bytes, because the heap grows in steps of 2 MiB. Those of the programs of `benchmarks/commands.py` differ by less."""


class CommandSupervisor:
    """Runs the probes of a command on one device, one at a time. A ``batchwright.driving.probe_runner.ProbeRunner``.

    Args:
        device: the device; its kind decides the limit and the allocator's environment. On the CPU addresses are not
            randomised, because the heap grows in steps of 2 MiB, which would fall elsewhere in every process.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._server: CommandForkServer | None = None
        self._served: CommandModel | None = None
        """The command of the server, also after the server has ended."""
        self._awaits_optimizers = True
        """Whether probes wait for optimizers that have not stepped; not after one that waited in vain."""
        self._why_fresh = ""
        """Why no process of that command is forked; empty while some are, and before the first probe of a search."""
        self._began_at: float | None = None
        """Begin of the first probe of the tuning, by the clock of files, which lags behind that of the host."""
        self._tight_plans: set[tuple[int, int]] = set()
        """Plans, as the sizes of micro-batch and update, that only a fresh process of the command can prove."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that probes run with, and that the job must run with."""
        return {**self.device.traits.environment_from(os.environ), **self.device.traits.command_environment}

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Check that the command can be started.

        Raises:
            SpecError: when its folder or its program does not exist.
        """
        del should_stop
        if request.command is not None:
            check_command(request.command.model)

    def end_search(self) -> None:
        """End the fork server. No other process outlives its probe. Idempotent."""
        with self._lock:
            self._end_server()
            self._served, self._began_at, self._awaits_optimizers = None, None, True

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end. Nothing of the command is left running.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the request is for no command.
            StorageError: when the disk for temporary files is full.
        """
        with self._lock:
            return run_explaining_crashes(
                lambda repeated: self._attempt(repeated, should_stop), request, self.device.kind
            )

    def _attempt(self, request: ProbeRequest, should_stop: Callable[[], bool]) -> tuple[ProbeResult, bool]:
        """Run a probe once, and return its result and whether a process crashed.

        A forked process whose result proves nothing of a fresh one is followed by a fresh one. If that ends otherwise,
        nothing is forked any more. A fit that leaves too little room for a fresh process still counts in a search,
        where it is no proof of a plan. No probe that replaced a file of the user is repeated.
        """
        if not isinstance(request.spec, CommandSpec):
            raise ProbeError("this supervisor runs commands only")
        forked, crashed = self._run_forked(request, request.spec, should_stop)
        if forked is not None:
            if proves_fresh_start(forked) or _overwrites(forked, request.spec.model):
                return forked, crashed
            if forked.outcome in {Outcome.FIT, Outcome.OOM} and not request.runs_plan:
                self._tight_plans.add(_plan_of(request))
                return _without_plan(forked), crashed
        fresh, crashed = self._run_once(request, request.spec, should_stop, FreshCommand, None)
        if forked is not None and not _ends_alike(forked, fresh):
            self._end_server("a forked process ended otherwise than a fresh one")
        imports = SharedImports(reason=self._why_fresh) if self._why_fresh else None
        return fresh.model_copy(update={"shared_imports": imports}), crashed

    def _run_forked(
        self, request: ProbeRequest, spec: CommandSpec, should_stop: Callable[[], bool]
    ) -> tuple[ProbeResult | None, bool]:
        """Run a probe in a forked process; no result where there can be none, or it would prove nothing."""
        server = self._server_of(spec.model, starts=not request.runs_plan)
        if server is None or (request.runs_plan and _plan_of(request) in self._tight_plans):
            return None, False
        try:
            result, crashed = self._run_once(request, spec, should_stop, server.fork, server.folder)
        except NotForkedError as error:
            self._end_server(str(error))
            return None, False
        return result.model_copy(update={"shared_imports": server.imports}), crashed

    def _run_once(
        self,
        request: ProbeRequest,
        spec: CommandSpec,
        should_stop: Callable[[], bool],
        start: Launcher,
        parent: Path | None,
    ) -> tuple[ProbeResult, bool]:
        with TemporaryFolder(parent) as folder:
            with translate_full_disk(folder):
                probe = CommandProbe(
                    request,
                    spec,
                    self.device,
                    folder,
                    awaits_optimizers=self._awaits_optimizers,
                    began_at=self._began_at,
                )
            self._began_at = self._began_at or probe.began_at
            ended = probe.run(start, should_stop)
            result = result_of(ended)
            if result.counted is not None and "optimizer-did-not-step" in result.counted.unseen:
                self._awaits_optimizers = False
            return result, ended.crashed and not _overwrites(result, spec.model)

    def _server_of(self, model: CommandModel, *, starts: bool) -> CommandForkServer | None:
        """The fork server of a command; none where it cannot have one, has lost it, or would have to start one."""
        if not starts:
            return self._server if self._served == model else None
        if self._served != model or (self._server is not None and self._server.is_closed):
            self._end_server()
            self._served = model
            program = find_program(model, os.environ)
            if program is not None and may_serve(program, model.argv):
                with translate_full_disk(Path(tempfile.gettempdir())):
                    self._server = CommandForkServer()
            else:
                self._why_fresh = "the command is not a Python program in a file, or isolates Python (-I, -E, -S)"
        return self._server

    def _end_server(self, why: str = "") -> None:
        """End the fork server, for a reason that the later probes of the command give."""
        self._why_fresh = why
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """End the fork server, as ``end_search``."""
        self.end_search()

    def __enter__(self) -> CommandSupervisor:  # noqa: PYI034 - not meant for subclassing
        """Return the supervisor."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the supervisor."""
        self.close()


def proves_fresh_start(result: ProbeResult) -> bool:
    """Return whether the result of a forked process holds for a fresh one too.

    A search asks whether a size fits and runs out of memory above it. A plan must fit in a fresh process, so that its
    forked one has to leave as much of the limit as the two may differ by.
    """
    is_of_plan = result.verifies_plan or (result.counted is not None and result.counted.of_plan)
    if not is_of_plan:
        return result.outcome in {Outcome.FIT, Outcome.OOM}
    if result.outcome is not Outcome.FIT or result.limit_bytes is None:
        return result.outcome is Outcome.FIT
    room = result.limit_bytes - (result.peak_reserved_bytes or result.process_peak_bytes or 0)
    return room >= max(_FORKED_BYTES, _FORKED_SHARE * result.limit_bytes)


def _plan_of(request: ProbeRequest) -> tuple[int, int]:
    return request.micro_batch_size, request.samples_per_window


def _ends_alike(forked: ProbeResult, fresh: ProbeResult) -> bool:
    """Return whether a forked and a fresh process ended in the same way."""
    return (forked.outcome, forked.error_type, forked.message) == (fresh.outcome, fresh.error_type, fresh.message)


def _overwrites(result: ProbeResult, model: CommandModel) -> bool:
    """Return whether a probe replaced files of the user, who has not allowed that."""
    return result.files is not None and bool(result.files.replaced) and not model.allow_overwriting


def _without_plan(result: ProbeResult) -> ProbeResult:
    """The result of a probe of a search, which proves no plan."""
    counted = result.counted
    return result.model_copy(update={"counted": counted and counted.model_copy(update={"of_plan": False})})
