"""A host's trouble hands work back, says why, and is over when it is over: no work fails for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from scarce import fill, small_disk
from test_service_coordinator import PATIENCE_SECONDS, VERSIONS, ended, queue_job, queue_tuning, when, worker_settings

from factories import CPU, recommendation
from scripted import ScriptedRunner, Trainer, new_work
from service.coordinator import Coordinator
from service.domain import JobRequest
from service.executor.base import Executor, OnProgress, StopWithin, TrainingRun
from service.executor.inline import InlineExecutor
from service.executor.local import LocalExecutor
from service.identifiers import IdentifierSource
from service.instruments import Instruments
from service.states import State, WorkKind
from service.store.base import Store
from tuner.requests import TrainingRequest
from tuner.training.runs import TrainingProgress, TrainingResult

pytestmark = pytest.mark.usefixtures("forked")

MIB = 1024**2
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs")


class Worker:
    """A coordinator of one device, and what it tells."""

    def __init__(self, store: Store, folder: Path, executor: Executor) -> None:
        self.instruments = Instruments()
        settings = worker_settings(folder)
        self.coordinator = Coordinator(
            store,
            [executor],
            VERSIONS,
            type(settings)(**{**vars(settings), "instruments": self.instruments}),
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.instruments.metrics.exposition().decode()
        return sum(it.value for family in families(text) for it in family.samples if it.name == name)

    def until_unready(self, wanted: float = 1.0) -> None:
        """Wait until the device takes no work, or takes work again. Reads no file and asks no database."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_SECONDS / 0.01)):
            if self.metric("batchwright_device_unready") == wanted:
                return
            pause.wait(0.01)
        raise AssertionError


StartWorker = Callable[..., Worker]


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker around an executor, or around a runner and a training function."""
    started: list[Worker] = []

    def new(train: Any = None, runner: ScriptedRunner | None = None, executor: Executor | None = None) -> Worker:
        made = executor or InlineExecutor(CPU, runner or ScriptedRunner(37), train or Trainer())
        started.append(Worker(store, tmp_path, made))
        started[-1].coordinator.start()
        return started[-1]

    yield new
    for worker in started:
        worker.coordinator.stop()


def states(store: Store, ids: list[str]) -> set[State]:
    """The states of works."""
    return {store.get(it).state for it in ids}


def announced(store: Store, unready: bool) -> str | None:  # noqa: FBT001 - reads as what is waited for
    """Why the device is unready, once it was announced as such, or as ready again."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        found = [seen.served.unready for seen in store.devices()]
        if found and (found[0] is not None) is unready:
            return found[0]
        pause.wait(0.01)
    raise AssertionError(store.devices())


# --- full disks ---


def queue_steady_job(store: Store, updates: int, keep: int) -> str:
    """Queue a job that writes a checkpoint after every update."""
    training = TrainingRequest(updates=updates, checkpoint_every=1, keep_checkpoints=keep)
    request = JobRequest(recommendation=recommendation(), training=training)
    work = new_work(IdentifierSource().new("job"), WorkKind.JOB, payload=request.model_dump_json())
    return store.add(work).id


def test_no_job_fails_on_a_full_disk(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Six jobs wait while the folder of runs is full; the device says why; all are done when there is room."""
    with small_disk(tmp_path / "runs", MIB) as runs:
        filler = fill(runs)
        jobs = [queue_job(store, updates=3) for _ in range(6)]
        worker = start()
        worker.until_unready()
        told = announced(store, unready=True)
        assert told is not None
        assert told.startswith("disk-full: ")
        assert str(runs) in told
        assert states(store, jobs) == {State.QUEUED}
        filler.unlink()
        assert [ended(store, it).state for it in jobs] == [State.SUCCEEDED] * 6
        assert announced(store, unready=False) is None


def test_no_work_fails_while_its_folder_cannot_be_made(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """A file in the place of the folder: jobs and tunings wait until it is gone."""
    (tmp_path / "runs").touch()
    works = [queue_job(store, updates=3), queue_tuning(store), queue_job(store, updates=3)]
    worker = start()
    worker.until_unready()
    assert "missing: " in (announced(store, unready=True) or "")
    assert states(store, works) == {State.QUEUED}
    (tmp_path / "runs").unlink()
    assert {ended(store, it).state for it in works} == {State.SUCCEEDED}


def test_a_disk_that_fills_beside_a_running_job_hands_it_back(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Others fill the disk while a process trains: its checkpoint waits for room, and the job ends well."""
    with small_disk(tmp_path / "runs", 4 * MIB) as runs:
        fillers: list[Path] = []
        executor = Filling(CPU, ScriptedRunner(0), lambda: fillers.append(fill(runs)))
        job = queue_steady_job(store, updates=150, keep=1)
        worker = start(executor=executor)
        worker.until_unready()
        item = when(store, job, lambda item: item.state is not State.RUNNING)
        assert (item.state, item.problem) == (State.QUEUED, None)
        fillers[0].unlink()
        item = ended(store, job)
        assert (item.state, item.problem) == (State.SUCCEEDED, None)


class Filling(LocalExecutor):
    """Calls ``filled`` once, when a run has made its first update."""

    def __init__(self, device: Any, runner: ScriptedRunner, filled: Callable[[], object]) -> None:
        super().__init__(device, runner)
        self.filled = filled
        self.done = False

    def _train(self, run: TrainingRun, on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
        def heard(updates: Sequence[TrainingProgress]) -> None:
            if updates and not self.done:
                self.done = True
                self.filled()
            on_progress(updates)

        return super()._train(run, heard, stop_within)


def test_a_job_that_fills_the_disk_itself_fails_with_words(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Its own checkpoints take all room: it fails, naming the disk, what is free and what helps."""
    with small_disk(tmp_path / "runs", MIB):
        worker = start(executor=LocalExecutor(CPU, ScriptedRunner(0)))
        item = ended(store, queue_steady_job(store, updates=500, keep=500))
        assert item.state is State.FAILED
        assert item.problem is not None
        assert item.problem.code == "training-failed"
        assert f"the disk of {tmp_path / 'runs' / item.id}" in item.problem.detail
        assert "full" in item.problem.detail
        assert "keep fewer checkpoints" in item.problem.detail
        assert worker.metric("batchwright_device_unready") == 0
