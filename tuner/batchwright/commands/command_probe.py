"""One run of a command under a limit: start it, follow what its processes report, and end its whole tree. No torch."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from batchwright.commands.environment import cards_of_host, cards_of_ranks, probe_environment
from batchwright.commands.fork_servers import ForkedCommand
from batchwright.commands.launching import Launch, Launcher
from batchwright.commands.outcomes import EndedCommand, EndReason, is_oom
from batchwright.commands.reports import Reports
from batchwright.commands.stacks import STACKS_SIGNAL, stacks_of
from batchwright.commands.templates import Figures, render
from batchwright.errors import ProbeCancelledError
from batchwright.hardware.failures import oom_texts
from batchwright.planning.accumulation import probe_window
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.system import subreaper
from batchwright.system.disk_space import translate_full_disk
from batchwright.system.files import tail
from batchwright.system.kept_process import KeptProcess
from batchwright.system.process_exit import classify_exit
from batchwright.system.processes import kernel_oom_kills
from batchwright.system.temporary_folders import room_for_sockets

_POLL_SECONDS = 0.03
_LOOK_SECONDS = 0.3
"""Interval at which the processes of the tree are listed, which reads every entry of /proc."""
_FAILED_RANK_SECONDS = 5.0
"""Grace of the other ranks where one has ended with an error: launchers end them, a collective would wait."""
_TIMED_UPDATES = 6
"""Updates of a probe that measures time: the first is left out, and five give a median."""
_PASSES_WITHOUT_STEP = 64
_UPDATES_WITHOUT_STEP = 8
"""Backward passes after which a command does not step: this many, and so many updates. A loss scaler that starts at
2**16 skips fewer."""
_OUTPUT_BYTES = 65536
"""The end of the output, in which an error is looked for: a compiler's command line alone may take several pages."""


def figures_of(request: ProbeRequest, updates: int) -> Figures:
    """The figures of a probe: those of the plan where the probe is of one, else of a few micro-batches."""
    world_size = request.spec.parallelism.world_size
    size = request.micro_batch_size
    is_of_plan = request.runs_plan or request.counts_plan
    steps = request.samples_per_window // size if is_of_plan else len(probe_window(request))
    return Figures(size, steps, world_size, updates)


class CommandProbe:
    """One run of a command under a limit, in a folder of its own.

    Args:
        request: the request of the probe.
        spec: its command.
        device: the device.
        folder: an empty folder, for everything that the probe writes.
        awaits_optimizers: whether to wait for the steps of every optimizer that the program has.
        began_at: begin of the first probe of the tuning, as `st_ctime` of its folder; this one by default.

    Attributes:
        began_at: begin of this probe.
    """

    def __init__(  # noqa: PLR0913 - what a probe depends on
        self,
        request: ProbeRequest,
        spec: CommandSpec,
        device: DeviceInfo,
        folder: Path,
        *,
        awaits_optimizers: bool = True,
        began_at: float | None = None,
    ) -> None:
        self._awaits_optimizers = awaits_optimizers
        self.began_at = folder.stat().st_ctime
        self._tuning_began_at = began_at or self.began_at
        self._request, self._spec, self._device, self._folder = request, spec, device, folder
        updates = spec.model.probe_updates
        self._updates = max(updates, _TIMED_UPDATES) if request.measures_time else updates
        self._figures = figures_of(request, self._updates)
        self._command = render(spec.model, self._figures, folder)
        self._own_cards = cards_of_ranks(device, self._figures.world_size, request.rank_devices)
        self._cards = cards_of_host(device)
        self._reports = Reports(folder / "events")
        self._unreached: dict[int, str] = {}
        self._most_passes = max(_PASSES_WITHOUT_STEP, _UPDATES_WITHOUT_STEP * self._figures.accumulation_steps)
        for name in ("events", "output", "tmp"):
            (folder / name).mkdir()
        self._command.write_files()
        (folder / "settings.json").write_text(json.dumps(self._settings()))
        self._launch: Launch = {
            "argv": list(self._command.argv),
            "working_directory": str(self._command.working_directory.absolute()),
            "environment": probe_environment(self._command.environment, device.kind, folder, self._own_cards),
            "fixes_addresses": device.traits.counts_host_memory,
        }

    def _settings(self) -> dict[str, object]:
        """The settings that every process of the command reads when it imports torch."""
        return {
            "device": self._device.kind,
            "limit_bytes": self._request.limit_bytes,
            "memory_margin": self._request.memory_margin,
            "updates": self._updates,
            "passes": self._figures.accumulation_steps if self._spec.model.takes_accumulation else 1,
            "awaits_optimizers": self._awaits_optimizers,
            "patience_seconds": self._request.timeout_seconds / 2,
            "counts_plan": self._request.counts_plan,
            "longest_first": self._spec.model.longest_first,
            "most_passes": self._most_passes,
            "ends": True,
            "tuning_began_at": self._tuning_began_at,
            "probe_began_at": self.began_at,
            "stacks_signal": STACKS_SIGNAL,
            "oom_texts": oom_texts(),
            "used_bytes": [self._cards[card].used_bytes for card in self._own_cards or self._cards],
            "least_context_bytes": self._device.least_context_bytes,
        }

    def run(self, start: Launcher, should_stop: Callable[[], bool]) -> EndedCommand:
        """Run the command until its updates are counted, or it fails or takes too long; then end it.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true; nothing of the command is left by then.
            NotForkedError: when it was to be forked, and could not.
        """
        requested_at, kills_before = time.monotonic(), kernel_oom_kills()
        environment = self._launch["environment"]
        with room_for_sockets(Path(environment["TMPDIR"])) as temporary:
            environment["TMPDIR"] = str(temporary)
            with translate_full_disk(self._folder):
                command = start(self._launch, self._folder)
            try:
                ending = self._follow(command, requested_at, should_stop)
                stacks = self._stacks() if ending in {EndReason.TIMED_OUT, EndReason.LOADING_TIMED_OUT} else ""
            finally:
                command.end()
        self._reports.read()
        oom_kills = kernel_oom_kills() - kills_before
        own = self._cards.get(self._device.id)
        # An OOM that was reported while the command ended comes first.
        return EndedCommand(
            request=self._request,
            model=self._spec.model,
            figures=self._figures,
            updates=self._updates,
            ending=EndReason.OOM if ending is not EndReason.FINISHED and self._has_oom() else ending,
            reports=self._reports,
            requested_at=requested_at,
            ended_at=time.monotonic(),
            exit=None if command.status is None else classify_exit(command.status, oom_kills),
            start_error=command.error,
            kernel_oom_kills=oom_kills,
            output=tail(self._folder / "output.txt", _OUTPUT_BYTES) if (self._folder / "output.txt").exists() else "",
            stacks=stacks,
            unreached=[line for pid, line in self._unreached.items() if not self._has_reported(pid)],
            other_processes_bytes=own.used_bytes if own else None,
            forked=isinstance(command, ForkedCommand),
            is_of_plan=self._figures.micro_batch_size * self._figures.accumulation_steps
            == self._request.samples_per_window,
        )

    def _follow(self, command: KeptProcess, began: float, should_stop: Callable[[], bool]) -> EndReason:
        looked_at, failed_at = 0.0, None
        while not command.wait(_POLL_SECONDS):
            self._reports.read()
            now = time.monotonic()
            if (ending := self._ending(now, began)) is not None:
                return ending
            if should_stop():
                raise ProbeCancelledError("the probe was cancelled")
            if command.subreaper is not None and now - looked_at > _LOOK_SECONDS:
                looked_at = now
                left = self._look_at_tree(command.subreaper)
                failed_at = (failed_at or now) if self._rank_has_failed(left) else None
                if failed_at is not None and now - failed_at > _FAILED_RANK_SECONDS:
                    return EndReason.BY_ITSELF
        self._reports.read()
        return self._ending(time.monotonic(), began, is_over=True) or EndReason.BY_ITSELF

    def _ending(  # noqa: PLR0911 - one per reason
        self, now: float, began: float, *, is_over: bool = False
    ) -> EndReason | None:
        """The reason to end the command now; None while it may go on."""
        reports, forward_at = self._reports, self._reports.forward_at
        if self._has_oom():
            return EndReason.OOM
        if reports.are_finished and (is_over or now > reports.settles_until):
            return EndReason.FINISHED
        if any(process.done is not None and not process.updates for process in reports.processes):
            return EndReason.NO_BACKWARD
        if is_over:
            return None
        # One that takes no accumulation may have any of its own.
        may_step = reports.has_optimizer and not self._spec.model.takes_accumulation
        if reports.waiting_passes >= self._most_passes and not may_step:
            return EndReason.NEVER_STEPS
        if forward_at is None:
            return EndReason.LOADING_TIMED_OUT if now - began > self._spec.model.loading_timeout_seconds else None
        return EndReason.TIMED_OUT if now - forward_at > self._request.timeout_seconds else None

    def _has_oom(self) -> bool:
        return any(is_oom(event) for process in self._reports.processes for event in process.ooms)

    def _look_at_tree(self, root: int) -> set[int]:
        """List the tree, and remember Python processes that may never report.

        A child of the subreaper that has not executed the command yet is still a Python process with its arguments.
        """
        left = subreaper.descendants(root)
        unknown = [it for it in left if it not in self._unreached and not self._has_reported(it)]
        for process in unknown:
            with suppress(OSError):
                line = _arguments(process)
                if Path(f"/proc/{process}/exe").readlink().name.startswith("python") and line != _arguments(root):
                    self._unreached[process] = line.decode(errors="replace").strip()[:200]
        return set(left)

    def _has_reported(self, process: int) -> bool:
        return any(reported.pid == process for reported in self._reports.processes)

    def _rank_has_failed(self, left: set[int]) -> bool:
        """Return whether a rank of several has ended before its updates, so that others may wait for it."""
        ranks = self._reports.in_forward
        gone = [rank for rank in ranks if rank.done is None and rank.pid not in left]
        return len(ranks) > 1 and bool(gone)

    def _stacks(self) -> str:
        """The stacks of the Python processes of the tree."""
        reported = {process.pid: " ".join(process.argv) for process in self._reports.processes}
        return stacks_of({**self._unreached, **reported}, self._folder / "events")


def _arguments(process: int) -> bytes:
    """Return the arguments of a process, with a space after each.

    Raises:
        OSError: when it has ended.
    """
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
