"""Tests of ``batchwright.commands.injected.counting``."""

from __future__ import annotations

from batchwright.commands.injected.counting import UpdateCounter


def update(counter: UpdateCounter, *sizes: int, optimizers: tuple[int, ...] = (1,)) -> None:
    """One update in micro-batches of these sizes."""
    for size in sizes:
        counter.backward((size, 32), {"loader 1": size})
    for optimizer in optimizers:
        counter.step(optimizer, 0.0)


def test_passes_and_samples_between_steps_are_an_update() -> None:
    """Samples are counted by the dimensions of the model's input and by the data loader."""
    counter = UpdateCounter(2)
    update(counter, 4, 4, 2)
    assert counter.updates[0].backward_passes == 3
    assert counter.updates[0].samples == {"loader 1": 10, "dimension 0": 10, "dimension 1": 96}


def test_passes_without_data_of_their_own_have_no_samples() -> None:
    """A second loss goes backward over the same call, and a loader may not tell what it drew."""
    counter = UpdateCounter(1)
    for drawn in (4, None):
        counter.backward((4, 3), {"loader 1": 4, "loader 2": drawn})
        counter.backward(None, {})
    counter.step(1, 0.0)
    assert counter.updates[0].backward_passes == 4
    assert counter.updates[0].samples == {"loader 1": 8, "dimension 0": 8, "dimension 1": 6}


def test_only_the_dimensions_that_all_inputs_have_are_counted() -> None:
    """A critic is called with rows, and a generator with images."""
    counter = UpdateCounter(1)
    counter.backward((4, 3, 8, 8), {})
    counter.backward((4, 5), {})
    counter.step(1, 0.0)
    assert counter.updates[0].samples == {"dimension 0": 8, "dimension 1": 8}


def test_two_optimizers_that_step_together_make_one_update() -> None:
    """Two optimizers share an update, such as Muon for matrices and AdamW for the rest."""
    counter = UpdateCounter(2)
    update(counter, 4, 4, optimizers=(1, 2))
    assert [each.backward_passes for each in counter.updates] == [2]
    assert not counter.is_complete()
    update(counter, 4, 4, optimizers=(1, 2))
    assert counter.is_complete()


def test_two_optimizers_that_step_in_turn_are_awaited() -> None:
    """Two optimizers have updates of their own, as those of a generator and its critic."""
    counter = UpdateCounter(2)
    for optimizer in (1, 2, 1):
        update(counter, 4, optimizers=(optimizer,))
    assert not counter.is_complete()
    update(counter, 4, optimizers=(2,))
    assert counter.is_complete()


def test_discarded_gradients_belong_to_no_update() -> None:
    """A loss scaler skips steps at its start."""
    counter = UpdateCounter(1)
    counter.backward((4,), {})
    counter.discard(1)
    update(counter, 4, 4)
    assert [each.backward_passes for each in counter.updates] == [2]
    assert counter.skipped == 1


def test_zeroing_before_any_backward_pass_discards_nothing() -> None:
    """Most programs begin so."""
    counter = UpdateCounter(1)
    counter.discard(1)
    assert counter.skipped == 0


def test_steps_without_a_backward_pass_are_no_update() -> None:
    """But they are steps, which end a program that trains nothing."""
    counter = UpdateCounter(2)
    assert not counter.step(1, 0.0)
    assert not counter.step(1, 0.0)
    assert counter.updates == []
    assert counter.is_complete()


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
    counter.backward((4,), {})
    assert not counter.is_in_last([])


def test_another_optimizer_may_discard_its_gradients_before_a_step() -> None:
    """Those of a critic, after the backward pass of its generator, whose own passes stay."""
    counter = UpdateCounter(1)
    counter.backward((4,), {})
    counter.discard(2)
    assert counter.waiting_passes == 0
    assert counter.step(1, 0.0)
    assert counter.updates[0].backward_passes == 1


def test_updates_with_fewer_passes_are_not_the_wanted_ones() -> None:
    """A program may ramp its accumulation: but not for ever."""
    counter = UpdateCounter(2, passes=3)
    for passes in (1, 2, 3):
        update(counter, *[4] * passes)
    assert not counter.is_complete()
    update(counter, 4, 4, 4)
    assert counter.is_complete()
    while not counter.is_exhausted:
        update(counter, 4)
    assert len(counter.updates) < 100


def test_the_last_batch_of_an_epoch_is_not_a_wanted_update() -> None:
    """It takes less memory than the others; but batches of random sizes are not waited for."""
    counter = UpdateCounter(2)
    for size in (256, 144):
        update(counter, size)
    assert not counter.is_complete()
    update(counter, 256)
    assert counter.is_complete()
    counter = UpdateCounter(2)
    for size in (9, 7, 5):
        update(counter, size)
    assert counter.is_complete()


def test_an_optimizer_that_has_not_stepped_is_awaited() -> None:
    """As that of a generator which steps after its critic."""
    counter = UpdateCounter(2)
    update(counter, 4)
    update(counter, 4)
    assert counter.is_complete()
    assert not counter.is_complete([2])


def test_the_updates_that_end_an_epoch_are_marked() -> None:
    """The iteration of a data loader begins before the first update, after the second, and within the fourth."""
    counter = UpdateCounter(9)
    counter.iterate()
    update(counter, 4)
    update(counter, 2)
    counter.iterate()
    update(counter, 4)
    counter.backward((4,), {})
    counter.iterate()
    counter.step(1, 0.0)
    assert counter.epoch_ends == {1, 3}
