"""Training runs that are killed at chosen moments, and what is left of them: for the soak test and its benchmark.

Their processes are started as in ``forked``.
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

from tests.support.factories import gpt_spec, recommendation
from tuner.hardware.allocator_env import CPU_THREADS
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import RunOutcome, TrainingResult
from tuner.training.launching.launcher import TrainingProcess
from tuner.training.launching.run_directory import ProgressLog, RunPaths

UPDATES = 14
UPDATES_PER_EPOCH = 4
CHECKPOINT_EVERY = 3
SAVED = (3, 6, 9, 12, UPDATES)
"""The updates of which checkpoints are written."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.005
_SHORT_POLL_SECONDS = 0.0005
_LONGEST_DELAY_SECONDS = 0.02
"""After what a kill waits for; about the time of an update, or of the longer of a save's two moments."""

# --- what is trained --------------------------------------------------------------------------------------------------


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
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], what: str, poll_seconds: float = _POLL_SECONDS) -> float:
    """Wait; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _PATIENCE_SECONDS:
            raise AssertionError(f"{what}: not within {_PATIENCE_SECONDS} s")
        time.sleep(poll_seconds)
    return time.monotonic() - began


def result_of(process: TrainingProcess) -> TrainingResult:
    """Its result, waited for."""
    wait_until(lambda: process.poll() is not None, "a result")
    return process.stop()


def has_made(process: TrainingProcess, update: int) -> bool:
    """Whether a run has told of ``update``, or has ended before."""
    return _lines(process.paths.progress) >= update or process.poll() is not None


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def started(directory: Path, found: Recommendation, request: TrainingRequest) -> Iterator[TrainingProcess]:
    """A run's processes, which the block's end ends."""
    process = TrainingProcess(directory)
    process.start(found, request)
    try:
        yield process
    finally:
        process.stop(grace_seconds=0.0)


# --- what a run leaves ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Final:
    """All that an undisturbed run and one that was killed must agree in."""

    outcome: RunOutcome
    stated_sha256: str | None
    """What the result says of the weights."""
    weights_sha256: str
    """What their file has."""
    averages_sha256: str
    updates: tuple[dict[str, Any], ...]
    """What was told of each update, without times and memory."""


def final_of(paths: RunPaths, result: TrainingResult) -> Final:
    """What a run has left."""
    told = ProgressLog(paths.progress).new_lines()
    return Final(
        outcome=result.outcome,
        stated_sha256=result.weights_sha256,
        weights_sha256=_sha256(paths.weights),
        averages_sha256=_sha256(paths.average_weights),
        updates=tuple(it.model_dump(exclude={"seconds", "peak_bytes"}) for it in told),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Reference = tuple[Final, float]
"""What an undisturbed run has left, and the seconds it took."""


def undisturbed(directory: Path, found: Recommendation, request: TrainingRequest) -> Reference:
    """A run from beginning to end, and its seconds."""
    began = time.monotonic()
    with started(directory, found, request) as process:
        result = result_of(process)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    return final_of(RunPaths(directory), result), time.monotonic() - began


@dataclass(frozen=True)
class Left:
    """What a kill leaves on the disk."""

    update: int
    """The last update told."""
    checkpoint: int | None
    """That of the newest checkpoint."""
    half_written: bool
    """There is a part of a checkpoint's folder."""
    unnamed: bool
    """There is a whole checkpoint which the pointer does not name yet."""

    @classmethod
    def of(cls, paths: RunPaths) -> Left:
        """What is there now."""
        checkpoint = paths.checkpointed_update()
        newest = max((int(it.name[-8:]) for it in paths.checkpoints.glob("update-*")), default=0)
        return cls(
            update=ProgressLog(paths.progress).last_update(),
            checkpoint=checkpoint,
            half_written=any(paths.checkpoints.glob(".update-*.part")),
            unnamed=newest > (checkpoint or 0),
        )

    @property
    def checkpoints_owed(self) -> set[int | None]:
        """Which checkpoint may be the newest: the last that was due, or the one before if it was just being written."""
        *before, last = [None, *(it for it in SAVED if it <= self.update)]
        return {last, *before[-1:]} if last == self.update else {last}

    @property
    def saving(self) -> bool:
        """Whether it was in a save."""
        return self.half_written or self.unnamed


# --- kills ------------------------------------------------------------------------------------------------------------


class Moment(StrEnum):
    """When a run is killed."""

    WINDOW = "in a window"
    SAVE = "in a save"
    POINTER = "before the pointer"
    EDGE = "at an epoch's edge"
    ANY = "at any time"


COUNTS = {Moment.WINDOW: 5, Moment.SAVE: 3, Moment.POINTER: 2, Moment.EDGE: 5, Moment.ANY: 5}
"""How often in a soak of twenty kills."""


@dataclass(frozen=True)
class Planned:
    """One of the soak's kills."""

    moment: Moment
    number: int
    """Among those at the same moment, from 0."""
    workers: int
    """Processes that load data."""

    def __str__(self) -> str:
        return f"{self.moment} {self.number}, {self.workers} workers"


def references(directory: Path) -> dict[int, Reference]:
    """Undisturbed runs by their number of processes that load data."""
    undisturbed(directory / "first", run_recommendation(), run_request())  # starts the server, which takes a while
    return {
        workers: undisturbed(directory / str(workers), run_recommendation(), run_request(workers)) for workers in (0, 2)
    }


def planned() -> list[Planned]:
    """Twenty kills, half of them with processes that load data."""
    kills = [(moment, number) for moment, count in COUNTS.items() for number in range(count)]
    return [Planned(moment, number, 2 * (place % 2)) for place, (moment, number) in enumerate(kills)]


@dataclass(frozen=True)
class Course:
    """A run that was killed once, and started again."""

    hit: bool
    """Whether it was killed, and at its moment."""
    left: Left
    loaders: int | None
    """Processes that loaded data after the first update; none when they were not counted."""
    gone_seconds: float
    """From the kill until no process of the run was there."""
    message: str
    """What the killed run's result says."""
    hold_seconds: float
    """What the second start waited for the folder, and took to write the run's files."""
    resumed_from: int | None
    seconds: float
    """From the first start to the result of the second."""
    final: Final


class Killer:
    """Chooses, waits for, and judges the moment of a kill.

    Args:
        plan: when to kill.
        attempt: how many kills have missed the moment.
        whole_seconds: how long an undisturbed run takes. Kills at any time are spread over it, its start included; over
            the less of it, the more often the run had ended before.
        seed: with the plan and the attempt, all that the random choices depend on.
    """

    def __init__(self, plan: Planned, attempt: int, whole_seconds: float, seed: int = 0) -> None:
        choices = random.Random(f"{plan}, attempt {attempt}, seed {seed}")
        self.moment = plan.moment
        self.workers = plan.workers
        self._delay = choices.uniform(0.0, _LONGEST_DELAY_SECONDS)
        self._update = choices.choice([it for it in range(1, UPDATES) if it not in SAVED])
        self._saved = choices.choice(SAVED)
        self._edge = UPDATES_PER_EPOCH * choices.randint(1, UPDATES // UPDATES_PER_EPOCH)
        self._at = whole_seconds * (plan.number + choices.random()) / COUNTS[self.moment] / (attempt + 1)

    def come(self, paths: RunPaths, began: float) -> bool:
        """Whether it is time, but for the delay."""
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
        """Seconds to wait then."""
        if self.moment is Moment.POINTER:
            return self._delay / 2
        return self._delay if self.moment in {Moment.WINDOW, Moment.SAVE} else 0.0

    def hit(self, left: Left) -> bool:
        """Whether the run that left this was killed at the moment."""
        return {
            Moment.WINDOW: left.update >= self._update and not left.saving,
            Moment.SAVE: left.half_written,
            Moment.POINTER: left.unnamed and not left.half_written,
            Moment.EDGE: left.update == self._edge,
            Moment.ANY: True,
        }[self.moment]


def kill_and_go_on(directory: Path, killer: Killer) -> Course:
    """Start, kill the main process, wait until all is gone by itself, and start again."""
    paths, found, request = RunPaths(directory), run_recommendation(), run_request(killer.workers)
    began = time.monotonic()
    with started(directory, found, request) as process:
        loaders, gone, killed = _kill(process, killer, began)
        left = Left.of(paths)
        ended = result_of(process)
    again = time.monotonic()
    with started(directory, found, request) as process:
        hold = time.monotonic() - again
        result = result_of(process)
    return Course(
        hit=killed and ended.outcome is RunOutcome.FAILED and killer.hit(left),
        left=left,
        loaders=loaders,
        gone_seconds=gone,
        message=ended.message,
        hold_seconds=hold,
        resumed_from=result.resumed_from,
        seconds=time.monotonic() - began,
        final=final_of(paths, result),
    )


def _kill(process: TrainingProcess, killer: Killer, began: float) -> tuple[int | None, float, bool]:
    """How many processes loaded data, how long all took to be gone, and whether the run was still there to kill."""
    paths, leader = process.paths, process.pids[0]
    loaders = None
    if killer.moment in {Moment.WINDOW, Moment.EDGE}:
        wait_until(lambda: has_made(process, 1), "the first update")
        loaders = len(session_of(leader)) - 1
    wait_until(lambda: killer.come(paths, began) or process.poll() is not None, killer.moment, _SHORT_POLL_SECONDS)
    time.sleep(killer.delay)
    if process.poll() is not None:
        return loaders, 0.0, False
    os.kill(leader, signal.SIGKILL)
    return loaders, wait_until(lambda: not session_of(leader), "the end of all processes"), True


def told_of(final: Final) -> list[int]:
    """The updates that a run told of, in the order of their lines."""
    return [it["update"] for it in final.updates]
