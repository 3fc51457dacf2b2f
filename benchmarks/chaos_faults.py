"""The faults of ``chaos.py``. A function of each returns what it did, or None if it missed its moment."""

import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from chaos_deployments import LEASE_SECONDS, Deployment, full_disk
from chaos_parts import Component, Found, PostgresqlServer, below, kill, of_role, probes, tasks
from reporting import wait_until

from batchwright.training.launching.run_directory import RunPaths
from tests.support.service.processes import are_gone
from tests.support.soak import DiskState, Killer, Moment, Planned

_FOUND_SECONDS = 60.0
"""Time in which the process that a fault kills must appear, and in which its moment must come."""
_FORK_SERVER_SECONDS = 2.0
"""Time that a fork server takes to start."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    strike: Callable[[Deployment], str | None]
    works: tuple[str, ...] = ("tuning", "job")
    """The kinds of work that it can disturb."""
    waits: bool = True
    """True if it happens at a random moment of the work, and not at one of its own."""
    during_submission: bool = False
    """True if it happens within milliseconds of a submission, which the SDK repeats."""


def kill_component(name: str, deployment: Deployment) -> str:
    """Kill the service, its API or a worker, sometimes once more while it recovers, and start it again."""
    component, generator = _component(name, deployment), deployment.generator
    busy = ", ".join(sorted(task.role for task in tasks(deployment.processes()))) or "nothing"
    _restart(component, deployment)
    if generator.random() > 1 / 3:
        return f"with {busy} running"
    seconds = generator.uniform(0.0, 5.0)
    time.sleep(seconds)
    _restart(component, deployment)
    return f"with {busy} running, and once more {seconds:.1f} s later"


def kill_process(find: Callable[[list[Found]], list[Found]], deployment: Deployment) -> str | None:
    """Kill a process that a supervisor of ours starts again, if anybody: a probe, a fork server, a worker."""
    found = _await(lambda: find(deployment.processes()), deployment)
    return f"one of {len(found)}" if found and kill(deployment.generator.choice(found).pid) else None


def kill_fork_server_at_its_start(deployment: Deployment) -> str | None:
    """Kill a fork server, and its successor while that imports what probes need."""

    def servers() -> list[Found]:
        return of_role("fork server", deployment.processes())

    known = {server.pid for server in servers() if kill(server.pid)}
    found = _await(lambda: [server for server in servers() if server.pid not in known], deployment)
    if not found:
        return None
    seconds = deployment.generator.uniform(0.0, _FORK_SERVER_SECONDS)
    time.sleep(seconds)
    return f"{1000 * seconds:.0f} ms after its start" if kill(found[0].pid) else None


def kill_training(moment: Moment, deployment: Deployment) -> str | None:
    """Kill a rank of a training run at a moment of the soak test: in an update, in a save, between epochs."""
    ranks = _await(lambda: of_role("training", deployment.processes()), deployment)
    if not ranks:
        return None
    victim = deployment.generator.choice(ranks)
    paths = RunPaths(Path(victim.command.partition("training.worker ")[2].split()[0]))
    plan, seed = Planned(moment, number=0, workers=0), deployment.generator.randrange(2**32)
    killer = Killer(plan, attempt=0, whole_seconds=0.0, seed=seed)
    wait_until(lambda: killer.is_due(paths, 0.0) or are_gone({victim.pid}), _FOUND_SECONDS, 0.0005)
    time.sleep(killer.delay)
    state = DiskState.of(paths) if kill(victim.pid) else None
    return f"after update {state.update}" if state and killer.hit(state) else None


def pause_worker(deployment: Deployment) -> str:
    """Stop the process of a worker until its lease has ended, and continue it."""
    processes = deployment.processes()
    workers = of_role("worker", processes)
    busy = [worker for worker in workers if tasks(below(worker.pid, processes))]
    worker = deployment.generator.choice(busy or workers)
    kill(worker.pid, signal.SIGSTOP)
    time.sleep(LEASE_SECONDS + 1.0)
    kill(worker.pid, signal.SIGCONT)
    return f"for {LEASE_SECONDS + 1.0:g} s"


def kill_database(deployment: Deployment) -> str:
    """Kill PostgreSQL, and start it again."""
    assert isinstance(deployment.database, PostgresqlServer)
    deployment.database.end(signal.SIGKILL)
    deployment.database.start()
    return "PostgreSQL"


def restart_part(names: tuple[str, ...], deployment: Deployment) -> str:
    """Kill a node or the head of the cluster with all that runs there, and start it again."""
    assert deployment.cluster is not None
    name = deployment.generator.choice(names)
    deployment.cluster.restart(name)
    return name


def fill_disk(deployment: Deployment) -> str:
    """Leave no room on the disk of the runs for a while."""
    seconds = _some_seconds(deployment)
    with full_disk(deployment.runs):
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def use_up_descriptors(name: str, deployment: Deployment) -> str:
    """Let the service or a worker open no file for a while."""
    root, processes = _component(name, deployment).pid, deployment.processes()
    own = [found.pid for found in below(root, processes) if found.role not in {"fork server", "training"}]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in [root, *own]}
    for pid, (_, hard) in before.items():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))  # open files stay open
    time.sleep(seconds := _some_seconds(deployment))
    for pid, limits in before.items():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    return f"{len(before)} processes for {seconds:.1f} s"


def faults_of(deployment: Deployment) -> list[Fault]:
    """Return the faults that can happen to a deployment."""
    names = list(dict.fromkeys(component.name for component in deployment.components))
    found = [Fault(name, partial(kill_component, name)) for name in names]
    found += [
        Fault("database disturbed", lambda deployment: deployment.database.disturb(_some_seconds(deployment))),
        Fault("probe", partial(kill_process, probes), ("tuning",)),
        Fault("training", partial(kill_process, partial(of_role, "training")), ("job",)),
    ]
    moments = [moment for moment in Moment if moment is not Moment.ANY]
    found += [Fault(f"training {moment}", partial(kill_training, moment), ("job",), waits=False) for moment in moments]
    if isinstance(deployment.database, PostgresqlServer):
        found.append(Fault("database", kill_database))
    if (cluster := deployment.cluster) is not None:
        roles = [Fault(role, partial(kill_process, partial(of_role, role))) for role in ("worker", "dispatcher")]
        parts = {"node": cluster.nodes, "head": (cluster.head,)}
        return [*found, *roles, *(Fault(name, partial(restart_part, parts[name])) for name in parts)]
    found += [
        Fault("fork server", partial(kill_process, partial(of_role, "fork server")), ("tuning",)),
        Fault("fork server while it starts", kill_fork_server_at_its_start, ("tuning",)),
        Fault(f"{names[0]} during a submission", partial(kill_component, names[0]), during_submission=True),
        Fault(f"{names[-1]} without descriptors", partial(use_up_descriptors, names[-1])),
        Fault("worker paused", pause_worker),
    ]
    if deployment.name == "embedded":
        found.append(Fault("worker", partial(kill_process, partial(of_role, "worker"))))  # `serve` starts it again
    if deployment.has_disk:
        found.append(Fault("disk full", fill_disk))
    return found


def _component(name: str, deployment: Deployment) -> Component:
    """Return a component of a name; any of several workers."""
    return deployment.generator.choice([component for component in deployment.components if component.name == name])


def _restart(component: Component, deployment: Deployment) -> None:
    """Kill a component and start it again, at once or when all that it started is gone."""
    component.kill()
    if deployment.generator.random() < 1 / 2:
        deployment.await_gone()
    component.start()


def _some_seconds(deployment: Deployment) -> float:
    """Return a time that may be longer than a lease."""
    return deployment.generator.uniform(0.3, 9.0)


def _await(find: Callable[[], list[Found]], deployment: Deployment) -> list[Found]:
    """Wait for processes that a fault is to kill. Return none if all work ended before."""
    found: list[Found] = []

    def is_over() -> bool:
        found[:] = find()
        return bool(found) or not deployment.unended()

    wait_until(is_over, _FOUND_SECONDS)
    return found
