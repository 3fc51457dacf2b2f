"""The course of a run: progress, pace, remaining time and losses in few numbers."""

import pytest

from batchwright.schemas.training import (
    MOST_LOSSES,
    CommandProgress,
    EvaluationReport,
    RunCourse,
    TrainingProgress,
    course_after,
)
from tests.support.service.scripted import progress


def made(update: int, updates: int = 1000, seconds: float = 2.0, loss: float | None = None) -> TrainingProgress:
    """An update whose loss is its own number."""
    changes = {"seconds": seconds, "loss": float(update) if loss is None else loss}
    return progress(update, updates).model_copy(update=changes)


def course_of(count: int, at_once: int = 1) -> RunCourse:
    """The course after so many updates, of which some are reported together."""
    found = None
    for first in range(1, count + 1, at_once):
        found = course_after(found, [made(update) for update in range(first, min(first + at_once, count + 1))])
    assert found is not None
    return found


def test_the_remaining_time_is_that_of_the_pace() -> None:
    """Updates that are done of all, seconds of one, and seconds of those that are left."""
    course = course_of(10)
    assert (course.update, course.updates) == (10, 1000)
    assert course.seconds_per_update == pytest.approx(2.0)
    assert course.seconds_remaining == pytest.approx(990 * 2.0)
    assert course_after(None, [made(1, updates=1)]).seconds_remaining == 0


def test_the_pace_follows_a_change() -> None:
    """The first update, which may compile, is soon forgotten; so is an earlier pace."""
    course = course_after(None, [made(1, seconds=60.0)])
    course = course_after(course, [made(update) for update in range(2, 60)])
    assert course.seconds_per_update == pytest.approx(2.0, rel=0.05)
    course = course_after(course, [made(update, seconds=6.0) for update in range(60, 90)])
    assert course.seconds_per_update == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 63, 64, 100, 1000])
def test_the_losses_are_spread_over_the_run(count: int) -> None:
    """At most 32, at equal intervals, and the newest is the last; how updates are grouped makes no difference."""
    course = course_of(count)
    interval = course.loss_interval
    assert len(course.losses) <= MOST_LOSSES
    assert len(course.losses) >= min(count, MOST_LOSSES // 2)
    regular = [float(update) for update in range(interval, count + 1, interval)]
    assert list(course.losses) == (regular if count % interval == 0 else [*regular, float(count)])
    assert course_of(count, at_once=7).losses == course.losses


@pytest.mark.parametrize(("count", "again"), [(100, 81), (100, 50), (64, 61), (33, 33), (33, 2), (33, 1), (100, 100)])
def test_a_run_that_goes_on_from_a_checkpoint_keeps_its_course(count: int, again: int) -> None:
    """The losses are those of a run without the interruption, and the pace begins where it was."""
    course = course_after(course_of(count), [made(again, seconds=3.0)])
    assert course.seconds_per_update == pytest.approx(2.0 + max(1 / again, 0.1))
    for update in range(again + 1, 111):
        course = course_after(course, [made(update)])
    assert (course.update, course.losses) == (110, course_of(110).losses)


def test_a_loss_that_is_not_finite_stays_unknown() -> None:
    """Others are rounded to five digits."""
    losses = [made(1, loss=1.2345678), made(2).model_copy(update={"loss": None})]
    assert course_after(None, losses).losses == (1.2346, None)


def test_a_course_that_begins_late_keeps_its_interval() -> None:
    """Where the first updates are not known, losses are still those of multiples of the interval, and the newest."""
    course = course_after(None, [made(update) for update in range(50, 91)])
    assert course.losses == tuple(float(update) for update in range(50, 91, 2))
    assert course.loss_interval == 2


def test_evaluations_take_their_part_of_the_remaining_time() -> None:
    """A second after each second update is half a second of each."""
    reports = [
        made(update).model_copy(update={"evaluations": (evaluated(update),) if update % 2 == 0 else ()})
        for update in range(1, 9)
    ]
    assert course_after(None, reports).seconds_remaining == pytest.approx(992 * 2.5)


def evaluated(update: int) -> EvaluationReport:
    """An evaluation that took a second."""
    return EvaluationReport(update=update, loss=1.0, terms={}, weights={}, samples=1, micro_batch_size=1, seconds=1.0)


def test_a_command_has_the_pace_of_its_own_count() -> None:
    """It has no losses; begun anew, it begins its course again; without a total there is no remaining time."""
    counted = CommandProgress(update=20, updates=100, samples_seen=640, samples_per_second=64.0)
    course = course_after(None, [counted])
    assert course == RunCourse(update=20, updates=100, seconds_per_update=0.5, seconds_remaining=40.0)
    again = course_after(course, [CommandProgress(update=1, updates=100, samples_seen=32)])
    assert (again.update, again.seconds_per_update, again.seconds_remaining) == (1, None, None)
    assert course_after(None, [counted.model_copy(update={"updates": None})]).seconds_remaining is None
