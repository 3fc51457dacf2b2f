"""SIGKILL at any moment of a run: the run resumes from its newest checkpoint and ends with bit-equal weights."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.schemas.training import RunOutcome
from batchwright.training.launching.run_directory import RunPaths
from tests.support.forked import forked_starts
from tests.support.soak import (
    UPDATES,
    KilledRun,
    Killer,
    Planned,
    Reference,
    RunOutput,
    has_made,
    kill_and_resume,
    output_of,
    planned,
    references,
    reported_updates,
    result_of,
    run_recommendation,
    run_request,
    started,
    undisturbed,
    wait_until,
)

pytestmark = pytest.mark.thorough  # the tests of the trainer and of resumption kill runs too

_ATTEMPTS = 5
"""Most runs until a kill hits its moment; all of them must end alike."""


@pytest.fixture(scope="module", autouse=True)
def _forked_starts() -> Iterator[None]:
    """Start runs without an interpreter, and make saves last long enough for a kill to hit them."""
    with forked_starts(fsync_seconds=0.01):
        yield


@pytest.fixture(scope="module")
def undisturbed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reference]:
    """Undisturbed runs by their number of data-loading workers."""
    return references(tmp_path_factory.mktemp("undisturbed"))


def test_processes_that_load_data_change_nothing(undisturbed_runs: dict[int, Reference]) -> None:
    """Weights, averages and reported updates are equal with two workers and with none."""
    assert undisturbed_runs[0][0] == undisturbed_runs[2][0]
    assert reported_updates(undisturbed_runs[0][0]) == list(range(1, UPDATES + 1))


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=str(plan)) for plan in planned()],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    plan: Planned, undisturbed_runs: dict[int, Reference], tmp_path: Path
) -> None:
    """In a window, in a save, at an epoch's edge, at any time: the hash is equal, and each update is reported once."""
    reference, seconds = undisturbed_runs[plan.workers]
    for attempt in range(_ATTEMPTS):
        killed_run = kill_and_resume(tmp_path / str(attempt), Killer(plan, attempt, seconds))
        _is_as_undisturbed(killed_run, reference, plan.workers)
        if killed_run.hit:
            return
    pytest.fail(f"no kill {plan.moment} in {_ATTEMPTS} runs")


def _is_as_undisturbed(killed_run: KilledRun, reference: RunOutput, workers: int) -> None:
    assert killed_run.final == reference, killed_run
    assert killed_run.final.weights_sha256 == killed_run.final.stated_sha256
    assert killed_run.disk_state.checkpoint in killed_run.disk_state.checkpoints_owed, killed_run
    assert killed_run.resumed_from == killed_run.disk_state.checkpoint, killed_run
    assert killed_run.loaders in {None, workers}, killed_run


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_resumes_after_a_rank_was_killed(victim: int, tmp_path: Path) -> None:
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
    assert (result.resumed_from, output_of(paths, result)) == (checkpoint, reference)
