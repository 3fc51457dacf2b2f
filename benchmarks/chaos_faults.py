"""What happens to a deployment in a round of ``chaos.py``."""

from __future__ import annotations

import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from chaos_deployment import LEASE_SECONDS, Deployment
from chaos_processes import Found, below, tasks
from typing_extensions import override

_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Choices:
    """What is random about a round: everything is decided before it begins."""

    at: float
    """When it happens, as a share of the time that the work takes undisturbed."""
    hold_seconds: float
    """How long a database is disturbed."""
    again_after: float | None
    """Seconds after the restart at which the same component is killed once more."""
    at_once: bool
    """Whether a component is restarted at once, or when all that it started is gone."""


@dataclass(frozen=True)
class Struck:
    """What a fault did."""

    what: str
    gone_seconds: float | None = None
    """How long the processes of a killed component took to be gone, where that was waited for."""
    strays: tuple[str, ...] = ()
    """Those that were not gone in the end."""


class Fault(ABC):
    """Something that goes wrong."""

    name: str

    @abstractmethod
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        """Do it, and mend what an operator or a supervisor would mend; none when the work ended before."""


class KillComponent(Fault):
    """SIGKILL to the service or the worker, once or twice; it is started again."""

    def __init__(self, component: str) -> None:
        self.name = component
        self._component = component

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        struck = self._kill(deployment, choices)
        if choices.again_after is not None:
            time.sleep(choices.again_after)
            self._kill(deployment, choices)
            return Struck(f"{struck.what}, and once more {choices.again_after:.1f} s later", struck.gone_seconds)
        return struck

    def _kill(self, deployment: Deployment, choices: Choices) -> Struck:
        component = deployment.components[self._component]
        busy = ", ".join(sorted(it.role for it in tasks(deployment.processes()))) or "nothing"
        component.kill()
        gone, strays = (None, ()) if choices.at_once else _gone(deployment)
        component.start()
        return Struck(f"with {busy} running", gone, strays)


class KillWhileAsked(KillComponent):
    """SIGKILL to what answers requests within milliseconds of a submission, which the SDK sends again."""

    _WITHIN_SECONDS = 0.1

    def __init__(self, component: str) -> None:
        super().__init__(component)
        self.name = f"{component} while it is asked"

    def strike_beside(self, deployment: Deployment, choices: Choices, ask: Callable[[], str]) -> tuple[str, Struck]:
        """What was asked for, in the end."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            delay = choices.at * self._WITHIN_SECONDS
            time.sleep(delay)
            struck = self._kill(deployment, choices)
            return asked.result(), replace(struck, what=f"{1000 * delay:.0f} ms after the submission began")


WORKER_PROCESS = "worker process"
"""That of the workers of `serve`, which starts it again."""


class Pause(Fault):
    """SIGSTOP to the process of the workers, until its lease has ended; then SIGCONT."""

    def __init__(self, component: str) -> None:
        self.name = f"{component} paused"
        self._component = component

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        paused = [it.pid for it in deployment.processes() if it.role == "worker"]
        seconds = LEASE_SECONDS + 1.0
        for number, pause_seconds in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
            for pid in paused:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause_seconds)
        return Struck(f"for {seconds:g} s")


class KillTask(Fault):
    """SIGKILL to the process that works on the device, the fork server that it comes from, or that of the workers."""

    def __init__(self, role: str) -> None:
        self.name = role

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and not ended():
            found = self._found(deployment)
            if found and _kill(found[0].pid):
                gone, strays = _gone(deployment)
                return Struck(f"process {found[0].pid}", gone, strays)
            time.sleep(0.005)
        return None

    def _found(self, deployment: Deployment) -> list[Found]:
        processes = deployment.processes()
        at_work = tasks(processes)
        if self.name == WORKER_PROCESS:
            return [it for it in processes if it.role == "worker"]
        if self.name == "fork server":
            return _fork_servers(deployment)
        wanted = "training" if self.name == "training" else "fork server"
        return [it for it in at_work if it.role == wanted]


class DisturbDatabase(Fault):
    """The database cannot be used for a while."""

    name = "database"

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        return Struck(deployment.database.disturb(choices.hold_seconds))


class KillForkServerAtItsStart(Fault):
    """SIGKILL to the fork server, and to the one that follows it, while that still imports what probes need."""

    name = "fork server while it starts"
    _STARTS_WITHIN_SECONDS = 2.0

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        known = {server.pid for server in _fork_servers(deployment)}
        for pid in known:
            _kill(pid)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and not ended():
            found = [server for server in _fork_servers(deployment) if server.pid not in known]
            if found:
                delay = choices.at * self._STARTS_WITHIN_SECONDS
                time.sleep(delay)
                struck = _kill(found[0].pid)
                gone, strays = _gone(deployment)
                return Struck(f"{1000 * delay:.0f} ms after its start", gone, strays) if struck else None
            time.sleep(0.005)
        return None


class FillRunsFolder(Fault):
    """The disk of the runs has no room left, for a while."""

    name = "runs folder full"

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        with deployment.runs_disk.full():
            time.sleep(choices.hold_seconds)
        return Struck(f"for {choices.hold_seconds:.1f} s")


class UseUpDescriptors(Fault):
    """The service or the worker can open no file, for a while."""

    def __init__(self, component: str) -> None:
        self.name = f"{component} without descriptors"
        self._component = component

    @override
    def strike(self, deployment: Deployment, choices: Choices, ended: Callable[[], bool]) -> Struck | None:
        before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in self._own(deployment)}
        for pid, (_, hard) in before.items():
            _limit_descriptors(pid, (1, hard))  # what is open stays open
        time.sleep(choices.hold_seconds)
        for pid, limits in before.items():
            _limit_descriptors(pid, limits)
        return Struck(f"{len(before)} processes for {choices.hold_seconds:.1f} s")

    def _own(self, deployment: Deployment) -> list[int]:
        """The component's processes, without those that work on the device."""
        root, processes = deployment.components[self._component].pid, deployment.processes()
        return [root, *(found.pid for found in below(root, processes) if found.role not in {"fork server", "training"})]


def _limit_descriptors(pid: int, limits: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _fork_servers(deployment: Deployment) -> list[Found]:
    """Fork servers, without what they have forked."""
    processes = deployment.processes()
    at_work = tasks(processes)
    return [found for found in processes if found.role == "fork server" and found not in at_work]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _gone(deployment: Deployment) -> tuple[float | None, tuple[str, ...]]:
    seconds = deployment.gone_seconds()
    return seconds, () if seconds is not None else tuple(f"{it.pid} {it.role}" for it in deployment.strays())


def faults_of(deployment: Deployment, work: str) -> list[Fault]:
    """What can happen to it while a tuning or a job runs."""
    first = next(iter(deployment.components))
    components = [*(KillComponent(name) for name in deployment.components), KillWhileAsked(first)]
    last = list(deployment.components)[-1]
    tasks_of: dict[str, list[Fault]] = {
        "tuning": [KillTask("probe"), KillTask("fork server"), KillForkServerAtItsStart()],
        "job": [KillTask("training")],
    }
    host: list[Fault] = [UseUpDescriptors(last)]
    if deployment.runs_disk.mounted:
        host.append(FillRunsFolder())
    apart = [] if "worker" in deployment.components else [KillTask(WORKER_PROCESS)]
    return [*components, Pause(last), *apart, *tasks_of[work], DisturbDatabase(), *host]
