"""Tests of ``batchwright.commands.injected.counting``."""

from __future__ import annotations

from batchwright.commands.injected.counting import UpdateCounter


def update(counter: UpdateCounter, *sizes: int, optimizers: tuple[int, ...] = (1,)) -> None:
    """One update in micro-batches of these sizes."""
    for size in sizes:
        counter.call(size, None)
        counter.backward(size)
    for optimizer in optimizers:
        counter.step(optimizer, 0.0)


def test_passes_and_samples_between_steps_are_an_update() -> None:
    """Samples are counted by the model's input and by the data loader."""
    counter = UpdateCounter(2)
    update(counter, 4, 4, 2)
    assert counter.updates[0].totals() == {
        "backward_passes": 3,
        "forward_samples": 10,
        "loader_samples": 10,
        "ended_at": 0.0,
    }


def test_the_first_call_before_a_backward_pass_has_the_batch() -> None:
    """Later ones may be of a loss, or of a part of the model."""
    counter = UpdateCounter(1)
    counter.call(8, None)
    counter.call(512, None)
    counter.backward(None)
    counter.step(1, 0.0)
    assert counter.updates[0].totals()["forward_samples"] == 8


def test_samples_that_one_pass_does_not_show_are_not_known() -> None:
    """A part of the samples would look like too few."""
    counter = UpdateCounter(1)
    update(counter, 4)
    counter.call(4, None)
    counter.backward(4)
    counter.backward(None)
    counter.step(1, 0.0)
    assert counter.updates[1].totals()["forward_samples"] is None


def test_two_optimizers_that_step_together_make_one_update() -> None:
    """Two optimizers share an update, such as Muon for matrices and AdamW for the rest."""
    counter = UpdateCounter(2)
    update(counter, 4, 4, optimizers=(1, 2))
    assert [each.backward_passes for each in counter.updates] == [2]
    assert not counter.is_complete
    update(counter, 4, 4, optimizers=(1, 2))
    assert counter.is_complete


def test_two_optimizers_that_step_in_turn_are_awaited() -> None:
    """Two optimizers have updates of their own, as those of a generator and its critic."""
    counter = UpdateCounter(2)
    for optimizer in (1, 2, 1):
        update(counter, 4, optimizers=(optimizer,))
    assert not counter.is_complete
    update(counter, 4, optimizers=(2,))
    assert counter.is_complete


def test_discarded_gradients_belong_to_no_update() -> None:
    """A loss scaler skips steps at its start."""
    counter = UpdateCounter(1)
    counter.backward(4)
    counter.discard()
    update(counter, 4, 4)
    assert [each.backward_passes for each in counter.updates] == [2]
    assert counter.skipped == 1


def test_zeroing_before_any_backward_pass_discards_nothing() -> None:
    """Most programs begin so."""
    counter = UpdateCounter(1)
    counter.discard()
    assert counter.skipped == 0


def test_steps_without_a_backward_pass_are_no_update() -> None:
    """But they are steps, which end a program that trains nothing."""
    counter = UpdateCounter(2)
    assert not counter.step(1, 0.0)
    assert not counter.step(1, 0.0)
    assert counter.updates == []
    assert counter.is_complete


def test_the_last_update_begins_once_every_optimizer_has_made_its_steps() -> None:
    """An optimizer that was constructed and has not stepped is still to make its state."""
    counter = UpdateCounter(2)
    assert not counter.is_in_last([1])
    update(counter, 4, 4)
    assert counter.is_in_last([1])
    assert not counter.is_in_last([1, 2])
    update(counter, 4, optimizers=(2,))
    assert not counter.is_in_last([1, 2])


def test_one_update_is_never_cut_off() -> None:
    """There is no update before it to be counted."""
    counter = UpdateCounter(1)
    counter.backward(4)
    assert not counter.is_in_last([])
