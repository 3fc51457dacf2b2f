"""Simulated hosts of a fleet: real workers on the real store, around scripted work. Started by ``fleet.py``.

The argument is JSON: ``url`` of the database, ``folder`` for lock files, ``hosts`` by name, ``devices`` of each host,
``lease_seconds``, ``lazy`` when work ends only by a stop request. Prints "ready" when every device is served, and ends
with its standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from service.store.database.engine import open_engine
from service.store.store import Store
from service.worker.coordinator import Coordinator
from service.worker.executors.base import GraceSeconds, OnProgress, TrainingRun
from service.worker.executors.inline import InlineExecutor, TrainFunction
from service.worker.settings import WorkerSettings
from service.worker_bootstrap import worker_connections
from tests.support.service.scripted import ScriptedRunner
from tuner.schemas.results import DeviceInfo
from tuner.schemas.training import RunOutcome, TrainingResult

STACK_BYTES = 256 * 1024
"""Thousands of threads share a process here."""
UPDATES_THAT_HOLD = 1_000_000
"""A job of as many updates runs until it is stopped."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """The hosts of one process."""

    url: str
    folder: str
    hosts: list[str]
    devices: int
    lease_seconds: float
    work_seconds: float


def card(index: int) -> DeviceInfo:
    """A device of a simulated host."""
    return DeviceInfo(id=f"cuda:{index}", kind="cuda", name="simulated card", total_bytes=80 * 1024**3)


def hardware() -> str:
    """The kind of every device, as work names it."""
    return f"{card(0).name}|{card(0).total_bytes}"


def scripted_run(work_seconds: float) -> TrainFunction:
    """A training function that sleeps, and holds its device when the job has ``UPDATES_THAT_HOLD`` updates."""

    def train(run: TrainingRun, _on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        pause = threading.Event()
        if run.request.updates < UPDATES_THAT_HOLD:
            pause.wait(work_seconds)
            return TrainingResult(outcome=RunOutcome.SUCCEEDED, message="scripted", updates=run.request.updates)
        while grace_seconds() is None:
            pause.wait(_LOOK_SECONDS)
        return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=0)

    return train


def host(plan: Plan, name: str) -> tuple[Store, Coordinator]:
    """The workers of one host, on a store of their own as in a process of their own."""
    folder = Path(plan.folder, name)
    settings = WorkerSettings(
        node_name=name,
        runs_dir=folder / "runs",
        locks_dir=folder / "locks",
        lease_seconds=plan.lease_seconds,
        poll_seconds=0.5,
        shutdown_grace_seconds=0.0,
    )
    train = scripted_run(plan.work_seconds)
    executors = [InlineExecutor(card(index), ScriptedRunner(37), train) for index in range(plan.devices)]
    store = Store(open_engine(plan.url, worker_connections(plan.devices)))
    return store, Coordinator(store, executors, {"torch": "2.8"}, settings, store.new_listener)


def main(text: str) -> None:
    """Serve until standard input ends."""
    plan = Plan(**json.loads(text))
    threading.stack_size(STACK_BYTES)
    with ExitStack() as stack:
        coordinators = []
        for name in plan.hosts:
            store, coordinator = host(plan, name)
            stack.callback(store.close)
            coordinators.append(coordinator)
            coordinator.start()
        print("ready", flush=True)
        sys.stdin.read()
        for coordinator in coordinators:
            coordinator.force_stop()
        for coordinator in coordinators:
            coordinator.stop()


if __name__ == "__main__":
    main(sys.argv[1])
