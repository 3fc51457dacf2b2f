"""Training runs that are killed at chosen moments, and the files they leave, for the soak test and its benchmark.

Processes are started as in ``forked``.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from batchwright.device_traits import CPU_THREADS
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from tests.support.factories import gpt_spec, recommendation
from tests.support.whole_runs import run_to_end

UPDATES = 14
UPDATES_PER_EPOCH = 4
CHECKPOINT_EVERY = 3
SAVED = (3, 6, 9, 12, UPDATES)
"""The updates of which checkpoints are written."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.005
_SHORT_POLL_SECONDS = 0.0005
_LONGEST_DELAY_SECONDS = 0.02
"""Longest delay of a kill after its moment, about the time of an update or of the longer of a save's two moments."""

# --- the run ----------------------------------------------------------------------------------------------------------


def run_recommendation(world_size: int = 1) -> Recommendation:
    """Dropout, clipping, a schedule, averages; windows of 16, 16, 16 and 2 samples in micro-batches of at most 5."""
    architecture = {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": 256, "dropout": 0.2}
    spec = gpt_spec(
        model={"kind": "reference", "architecture": architecture},
        schedule={"name": "cosine", "warmup_updates": 3},
        gradient_clipping=0.5,
        ema_decay=0.9,
    )
    return recommendation(
        spec.with_world_size(world_size), 16, 5, world_size=world_size, environment={**CPU_THREADS, **ONE_THREAD}
    )


def run_request(workers: int = 0, processes_per_node: int | None = None) -> TrainingRequest:
    """Three epochs and a half; the checkpoint of update 12 is at an epoch's edge, the others within an epoch."""
    return TrainingRequest(
        updates=UPDATES,
        checkpoint_every=CHECKPOINT_EVERY,
        workers=workers,
        seed=7,
        processes_per_node=processes_per_node,
    )


# --- processes --------------------------------------------------------------------------------------------------------


def session_of(leader: int) -> list[int]:
    """The running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # the process has just ended
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], what: str, poll_seconds: float = _POLL_SECONDS) -> float:
    """Wait for a condition. Return the seconds of the wait."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _TIMEOUT_SECONDS:
            raise AssertionError(f"{what}: not within {_TIMEOUT_SECONDS} s")
        time.sleep(poll_seconds)
    return time.monotonic() - began


def result_of(process: TrainingProcess) -> TrainingResult:
    """Wait for the result of a run."""
    wait_until(lambda: process.poll() is not None, "a result")
    return process.stop()


def has_made(process: TrainingProcess, update: int) -> bool:
    """Return whether a run has reported ``update``, or has ended before."""
    return _lines(process.paths.progress) >= update or process.poll() is not None


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def started(directory: Path, found: Recommendation, request: TrainingRequest) -> Iterator[TrainingProcess]:
    """Start a run's processes, and stop them at the end of the block."""
    process = TrainingProcess(directory)
    process.start(found, request)
    try:
        yield process
    finally:
        process.stop(grace_seconds=0.0)


def killed_and_resumed(directory: Path, found: Recommendation, request: TrainingRequest, update: int) -> TrainingResult:
    """Kill a run once it has made ``update``, run it to its end from its checkpoint, and return the result."""
    with started(directory, found, request) as process:
        wait_until(lambda: has_made(process, update), f"update {update}")
        for pid in process.pids:
            os.kill(pid, signal.SIGKILL)
        assert result_of(process).outcome is RunOutcome.FAILED
    result = run_to_end(directory, found, request)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert result.resumed_from
    return result


# --- the output of a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOutput:
    """Output that must be equal for an undisturbed run and a killed one."""

    outcome: RunOutcome
    stated_sha256: str | None
    """Hash of the weights in the result."""
    weights_sha256: str
    """Hash of the file of the weights."""
    averages_sha256: str
    updates: tuple[dict[str, Any], ...]
    """Progress of each update, without times and memory."""


def output_of(paths: RunPaths, result: TrainingResult) -> RunOutput:
    """The output of a run."""
    reported = ProgressLog(paths.progress).new_lines()
    return RunOutput(
        outcome=result.outcome,
        stated_sha256=result.weights_sha256,
        weights_sha256=_sha256(paths.weights),
        averages_sha256=_sha256(paths.average_weights),
        updates=tuple(progress.model_dump(exclude={"seconds", "peak_bytes"}) for progress in reported),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Reference = tuple[RunOutput, float]
"""Output of an undisturbed run, and its seconds."""


def undisturbed(directory: Path, found: Recommendation, request: TrainingRequest) -> Reference:
    """Make a run from beginning to end. Return its output and its seconds."""
    began = time.monotonic()
    with started(directory, found, request) as process:
        result = result_of(process)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    return output_of(RunPaths(directory), result), time.monotonic() - began


@dataclass(frozen=True)
class DiskState:
    """Files of a run after a kill."""

    update: int
    """The last reported update."""
    checkpoint: int | None
    """The update of the newest checkpoint."""
    half_written: bool
    """True if there is an incomplete folder of a checkpoint."""
    unnamed: bool
    """True if there is a complete checkpoint that the pointer does not name yet."""

    @classmethod
    def of(cls, paths: RunPaths) -> DiskState:
        """Read the current files of a run."""
        checkpoint = paths.checkpointed_update()
        newest = max((int(path.name[-8:]) for path in paths.checkpoints.glob("update-*")), default=0)
        return cls(
            update=ProgressLog(paths.progress).last_update(),
            checkpoint=checkpoint,
            half_written=any(paths.checkpoints.glob(".update-*.part")),
            unnamed=newest > (checkpoint or 0),
        )

    @property
    def checkpoints_owed(self) -> set[int | None]:
        """Updates whose checkpoint may be the newest: the last that was due, or the one before during its save."""
        *before, last = [None, *(update for update in SAVED if update <= self.update)]
        return {last, *before[-1:]} if last == self.update else {last}

    @property
    def was_saving(self) -> bool:
        """Return whether the run was killed in a save."""
        return self.half_written or self.unnamed


# --- kills ------------------------------------------------------------------------------------------------------------


class Moment(StrEnum):
    """Moment at which a run is killed."""

    WINDOW = "in a window"
    SAVE = "in a save"
    POINTER = "before the pointer"
    EDGE = "at an epoch's edge"
    ANY = "at any time"


COUNTS = {Moment.WINDOW: 5, Moment.SAVE: 3, Moment.POINTER: 2, Moment.EDGE: 5, Moment.ANY: 5}
"""Number of kills at each moment, in a soak of twenty."""


@dataclass(frozen=True)
class Planned:
    """One of the soak's kills."""

    moment: Moment
    number: int
    """Number among the kills at the same moment, from 0."""
    workers: int
    """Processes that load data."""

    def __str__(self) -> str:
        return f"{self.moment} {self.number}, {self.workers} workers"


def references(directory: Path) -> dict[int, Reference]:
    """Undisturbed runs by their number of data-loading workers."""
    undisturbed(directory / "first", run_recommendation(), run_request())  # starts the server, which takes a while
    return {
        workers: undisturbed(directory / str(workers), run_recommendation(), run_request(workers)) for workers in (0, 2)
    }


def planned() -> list[Planned]:
    """Twenty kills, half of them with data-loading workers."""
    kills = [(moment, number) for moment, count in COUNTS.items() for number in range(count)]
    return [Planned(moment, number, 2 * (place % 2)) for place, (moment, number) in enumerate(kills)]


@dataclass(frozen=True)
class KilledRun:
    """A run that was killed once, and started again."""

    hit: bool
    """True if the run was killed, and at the planned moment."""
    disk_state: DiskState
    loaders: int | None
    """Data-loading workers after the first update; None if they were not counted."""
    exit_seconds: float
    """Seconds from the kill until all processes of the run had ended."""
    message: str
    """Message of the killed run's result."""
    lock_seconds: float
    """Seconds that the second start waited for the folder's lock and wrote the run's files."""
    resumed_from: int | None
    seconds: float
    """Seconds from the first start to the result of the second."""
    final: RunOutput


class Killer:
    """Choice of the moment of a kill, and the check that the kill hit the moment.

    Args:
        plan: the moment of the kill.
        attempt: number of kills that have missed the moment.
        whole_seconds: seconds of an undisturbed run. Kills at any time are spread over them, including the start, and
            over a smaller part after each attempt for which the run had ended before.
        seed: seeds the random choices, together with the plan and the attempt.
    """

    def __init__(self, plan: Planned, attempt: int, whole_seconds: float, seed: int = 0) -> None:
        choices = random.Random(f"{plan}, attempt {attempt}, seed {seed}")
        self.moment = plan.moment
        self.workers = plan.workers
        self._delay = choices.uniform(0.0, _LONGEST_DELAY_SECONDS)
        self._update = choices.choice([update for update in range(1, UPDATES) if update not in SAVED])
        self._saved = choices.choice(SAVED)
        self._edge = UPDATES_PER_EPOCH * choices.randint(1, UPDATES // UPDATES_PER_EPOCH)
        self._at = whole_seconds * (plan.number + choices.random()) / COUNTS[self.moment] / (attempt + 1)

    def is_due(self, paths: RunPaths, began: float) -> bool:
        """Return whether the moment has come, except for the delay."""
        if self.moment is Moment.ANY:
            return time.monotonic() - began >= self._at
        if self.moment is Moment.SAVE:
            return (paths.checkpoints / f".update-{self._saved:08d}.part").exists()
        if self.moment is Moment.POINTER:
            return (paths.checkpoints / f"update-{self._saved:08d}").exists()
        wanted = self._edge if self.moment is Moment.EDGE else self._update
        return _lines(paths.progress) >= wanted

    @property
    def delay(self) -> float:
        """Seconds between the moment and the kill."""
        if self.moment is Moment.POINTER:
            return self._delay / 2
        return self._delay if self.moment in {Moment.WINDOW, Moment.SAVE} else 0.0

    def hit(self, disk_state: DiskState) -> bool:
        """Return whether the run that left these files was killed at the moment."""
        return {
            Moment.WINDOW: disk_state.update >= self._update and not disk_state.was_saving,
            Moment.SAVE: disk_state.half_written,
            Moment.POINTER: disk_state.unnamed and not disk_state.half_written,
            Moment.EDGE: disk_state.update == self._edge,
            Moment.ANY: True,
        }[self.moment]


def kill_and_resume(directory: Path, killer: Killer) -> KilledRun:
    """Start, kill the main process, wait until the other processes have ended, and start again."""
    paths, found, request = RunPaths(directory), run_recommendation(), run_request(killer.workers)
    began = time.monotonic()
    with started(directory, found, request) as process:
        loaders, exit_seconds, killed = _kill(process, killer, began)
        disk_state = DiskState.of(paths)
        ended = result_of(process)
    again = time.monotonic()
    with started(directory, found, request) as process:
        lock_seconds = time.monotonic() - again
        result = result_of(process)
    return KilledRun(
        hit=killed and ended.outcome is RunOutcome.FAILED and killer.hit(disk_state),
        disk_state=disk_state,
        loaders=loaders,
        exit_seconds=exit_seconds,
        message=ended.message,
        lock_seconds=lock_seconds,
        resumed_from=result.resumed_from,
        seconds=time.monotonic() - began,
        final=output_of(paths, result),
    )


def _kill(process: TrainingProcess, killer: Killer, began: float) -> tuple[int | None, float, bool]:
    """Kill a run. Return its number of workers, the seconds until all processes had ended, and whether it was alive."""
    paths, leader = process.paths, process.pids[0]
    loaders = None
    if killer.moment in {Moment.WINDOW, Moment.EDGE}:
        wait_until(lambda: has_made(process, 1), "the first update")
        loaders = len(session_of(leader)) - 1
    wait_until(lambda: killer.is_due(paths, began) or process.poll() is not None, killer.moment, _SHORT_POLL_SECONDS)
    time.sleep(killer.delay)
    if process.poll() is not None:
        return loaders, 0.0, False
    os.kill(leader, signal.SIGKILL)
    return loaders, wait_until(lambda: not session_of(leader), "the end of all processes"), True


def reported_updates(final: RunOutput) -> list[int]:
    """The updates that a run reported, in the order of their lines."""
    return [update["update"] for update in final.updates]
