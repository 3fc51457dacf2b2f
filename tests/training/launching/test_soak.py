"""SIGKILL at any moment of a run: it goes on from its newest checkpoint to the very same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import forked_starts
from tests.support.soak import (
    UPDATES,
    Course,
    Final,
    Killer,
    Planned,
    Reference,
    final_of,
    has_made,
    kill_and_go_on,
    planned,
    references,
    result_of,
    run_recommendation,
    run_request,
    started,
    told_of,
    undisturbed,
    wait_until,
)
from tuner.schemas.training import RunOutcome
from tuner.training.launching.run_directory import RunPaths

_ATTEMPTS = 5
"""How many runs a kill may take to come at its moment; all of them must end alike."""


@pytest.fixture(scope="module", autouse=True)
def _forked_starts() -> Iterator[None]:
    """No run of this module starts an interpreter; saves last long enough to be met by a kill."""
    with forked_starts(fsync_seconds=0.01):
        yield


@pytest.fixture(scope="module")
def undisturbed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reference]:
    """By their number of processes that load data."""
    return references(tmp_path_factory.mktemp("undisturbed"))


def test_processes_that_load_data_change_nothing(undisturbed_runs: dict[int, Reference]) -> None:
    """Weights, averages and what is told of the updates are the same with two as with none."""
    assert undisturbed_runs[0][0] == undisturbed_runs[2][0]
    assert told_of(undisturbed_runs[0][0]) == list(range(1, UPDATES + 1))


@pytest.mark.parametrize("plan", planned(), ids=str)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    plan: Planned, undisturbed_runs: dict[int, Reference], tmp_path: Path
) -> None:
    """In a window, in a save, at an epoch's edge, at any time: the same hash, each update told once, nothing lost."""
    reference, seconds = undisturbed_runs[plan.workers]
    for attempt in range(_ATTEMPTS):
        course = kill_and_go_on(tmp_path / str(attempt), Killer(plan, attempt, seconds))
        _is_as_undisturbed(course, reference, plan.workers)
        if course.hit:
            return
    pytest.fail(f"no kill {plan.moment} in {_ATTEMPTS} runs")


def _is_as_undisturbed(course: Course, reference: Final, workers: int) -> None:
    assert course.final == reference, course
    assert course.final.weights_sha256 == course.final.stated_sha256
    assert course.left.checkpoint in course.left.checkpoints_owed, course
    assert course.resumed_from == course.left.checkpoint, course
    assert course.loaders in {None, workers}, course


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_which_goes_on(victim: int, tmp_path: Path) -> None:
    """Of two ranks one is killed: the other ends by itself, the result says who, and the run ends bit-equal."""
    found, request = run_recommendation(world_size=2), run_request(processes_per_node=2)
    reference, _ = undisturbed(tmp_path / "whole", found, request)
    paths = RunPaths(tmp_path / "killed")
    with started(paths.directory, found, request) as process:
        wait_until(lambda: has_made(process, 4), "update 4")
        os.kill(process.pids[victim], signal.SIGKILL)
        wait_until(lambda: process.poll() is not None, "the end of the other rank")
        ended = result_of(process)
        killed_by_us = process._ranks._killed if process._ranks else None
    assert ended.outcome is RunOutcome.FAILED
    assert f"process of rank {victim} was killed from outside (SIGKILL)" in ended.message
    assert killed_by_us == set()
    checkpoint = paths.checkpointed_update()
    with started(paths.directory, found, request) as process:
        result = result_of(process)
    assert (result.resumed_from, final_of(paths, result)) == (checkpoint, reference)
