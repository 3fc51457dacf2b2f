"""The arithmetic of accumulation: plans are exact, even, minimal, and say what they change."""

import re

import pytest
from hypothesis import assume, given, settings, strategies as st

from batchwright.errors import PlanError
from batchwright.planning.accumulation import (
    MOST_MICRO_BATCHES,
    balanced_plan,
    balanced_split,
    share_per_rank,
    uniform_plan,
)

many = settings(max_examples=300, deadline=None, derandomize=True)
batches = st.integers(1, 5000)
ranks = st.integers(1, 64)
largest_sizes = st.integers(1, 600)
small_batches, small_ranks, small_sizes = st.integers(1, 80), st.integers(1, 6), st.integers(1, 15)


@many
@given(batches, ranks)
def test_shares_sum_to_the_effective_batch_and_differ_by_at_most_one(batch: int, world: int) -> None:
    """Every rank has a sample, no rank has two more than another, and together they have the batch."""
    assume(batch >= world)
    shares = share_per_rank(batch, world)
    assert len(shares) == world
    assert sum(shares) == batch
    assert 1 <= min(shares) <= max(shares) <= min(shares) + 1
    assert list(shares) == sorted(shares, reverse=True)


@many
@given(st.integers(0, 2000), st.integers(0, 300))
def test_a_split_is_even_and_leaves_no_part_empty(samples: int, parts: int) -> None:
    """The parts sum to the samples, differ by at most one, and are never more than there are samples."""
    sizes = balanced_split(samples, parts)
    assert len(sizes) == min(parts, samples)
    assert not sizes or (sum(sizes) == samples and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)


@many
@given(batches, ranks, largest_sizes)
def test_a_balanced_plan_gives_exactly_the_effective_batch(batch: int, world: int, largest: int) -> None:
    """Each rank's micro-batches sum to its share, and all ranks' to the batch."""
    assume(batch >= world)
    plan = balanced_plan(batch, world, largest)
    assert tuple(sum(sizes) for sizes in plan.micro_batch_sizes) == share_per_rank(batch, world)
    assert sum(map(sum, plan.micro_batch_sizes)) == batch


@many
@given(batches, ranks, largest_sizes)
def test_micro_batches_are_even_and_none_is_above_the_largest_or_empty(batch: int, world: int, largest: int) -> None:
    """The sizes of a rank differ by at most one, and lie between one and the largest that fits."""
    assume(batch >= world)
    for sizes in balanced_plan(batch, world, largest).micro_batch_sizes:
        assert 1 <= min(sizes) <= max(sizes) <= largest
        assert max(sizes) - min(sizes) <= 1


@many
@given(batches, ranks, largest_sizes)
def test_a_balanced_plan_takes_the_fewest_steps(batch: int, world: int, largest: int) -> None:
    """One step fewer could not hold the largest share; no rank takes more steps than the plan says."""
    assume(batch >= world)
    plan = balanced_plan(batch, world, largest)
    assert (plan.gradient_accumulation_steps - 1) * largest < max(share_per_rank(batch, world))
    assert max(map(len, plan.micro_batch_sizes)) == plan.gradient_accumulation_steps


@many
@given(batches, ranks, st.integers(2, 600))
def test_ranks_take_the_same_number_of_steps(batch: int, world: int, largest: int) -> None:
    """From micro-batches of two samples on, every rank takes the same number of steps."""
    assume(batch >= world)
    plan = balanced_plan(batch, world, largest)
    assert {len(sizes) for sizes in plan.micro_batch_sizes} == {plan.gradient_accumulation_steps}


@many
@given(batches, ranks, largest_sizes)
def test_a_uniform_plan_gives_the_batch_that_it_says(batch: int, world: int, largest: int) -> None:
    """Size x steps x ranks is the effective batch achieved, no size is too large, and ``exact`` tells the truth."""
    assume(batch >= world)
    plan = uniform_plan(batch, world, largest)
    assert plan.micro_batch_size <= largest
    assert plan.micro_batch_size * plan.gradient_accumulation_steps * world == plan.effective_batch_size
    assert plan.requested_effective_batch_size == batch
    assert plan.exact == (plan.effective_batch_size == batch) == (batch % world == 0)


@many
@given(batches, ranks, largest_sizes)
def test_a_uniform_plan_says_by_how_much_it_misses(batch: int, world: int, largest: int) -> None:
    """The change names the batch it gives and the difference; a plan that is exact speaks of no other batch."""
    assume(batch >= world)
    plan = uniform_plan(batch, world, largest)
    achieved = plan.effective_batch_size
    if achieved != batch:
        assert f"becomes {achieved} instead of {batch} ({achieved - batch:+d})" in plan.change
    else:
        assert "becomes" not in plan.change


@many
@given(st.integers(1, 300), small_ranks, largest_sizes)
def test_an_exact_uniform_plan_takes_the_largest_divisor(share: int, world: int, largest: int) -> None:
    """Of the sizes that divide the share of a rank, the largest that fits: the fewest steps."""
    plan = uniform_plan(share * world, world, largest)
    assert plan.micro_batch_size == max(size for size in range(1, min(share, largest) + 1) if share % size == 0)


@many
@given(batches, ranks, largest_sizes)
def test_nearest_batches_are_reachable(batch: int, world: int, largest: int) -> None:
    """Each offered batch is the product of its size, its steps and the ranks; at most one lies on each side."""
    assume(batch >= world)
    offered = uniform_plan(batch, world, largest).nearest
    for item in offered:
        assert item.micro_batch_size <= largest
        assert item.micro_batch_size * item.gradient_accumulation_steps * world == item.effective_batch_size
    assert sum(item.effective_batch_size > batch for item in offered) <= 1
    assert sum(item.effective_batch_size <= batch for item in offered) <= 1


@settings(many, max_examples=500)
@given(small_batches, small_ranks, small_sizes)
def test_a_uniform_plan_that_misses_is_the_nearest_with_its_size_or_more(batch: int, world: int, largest: int) -> None:
    """No micro-batch at least as large reaches an effective batch that is nearer."""
    assume(batch >= world)
    plan = uniform_plan(batch, world, largest)
    missed = abs(plan.effective_batch_size - batch)
    for size in range(plan.micro_batch_size, largest + 1):
        below, above = batch % (size * world), -batch % (size * world)
        assert missed <= (above if batch < size * world else min(below, above))


@settings(many, max_examples=500)
@given(small_batches, small_ranks, small_sizes)
def test_a_uniform_plan_takes_the_fewest_steps_to_the_batch_it_gives(batch: int, world: int, largest: int) -> None:
    """No larger micro-batch that fits gives the same effective batch in fewer steps."""
    assume(batch >= world)
    plan = uniform_plan(batch, world, largest)
    share = plan.effective_batch_size // world
    assert plan.micro_batch_size == max(size for size in range(1, largest + 1) if share % size == 0)


def test_a_hundred_at_most_thirty_seven_at_a_time() -> None:
    """34 + 33 + 33, never 37 + 37 + 26."""
    assert balanced_plan(100, 1, 37).micro_batch_sizes == ((34, 33, 33),)


def test_a_poor_uniform_plan_offers_batches_that_fill_the_device() -> None:
    """101 is prime: one sample at a time is exact, and 99 or 102 are offered with three steps."""
    plan = uniform_plan(101, 1, 37)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (1, 101)
    assert plan.change.startswith("101 accumulation steps instead of 3: 1 is the largest size up to 37")
    offered = [
        (item.effective_batch_size, item.micro_batch_size, item.gradient_accumulation_steps) for item in plan.nearest
    ]
    assert offered == [(100, 25, 4), (102, 34, 3)]


def test_a_uniform_plan_that_changes_nothing_says_so() -> None:
    """Where one size divides the share in the fewest steps, the plan is as good as the balanced one."""
    plan = uniform_plan(128, 2, 32)
    assert plan.change == "No change: 2 x 2 x 32 is exactly 128."
    assert plan.nearest == ()


@pytest.mark.parametrize(
    ("batch", "world", "largest", "message"),
    [
        (0, 1, 1, "got 0 and 1"),
        (8, 0, 1, "got 8 and 0"),
        (8, -2, 1, "got 8 and -2"),
        (3, 4, 1, "an effective batch of 3 leaves 1 of 4 ranks without a sample: use at most 3 ranks"),
        (8, 2, 0, "the largest micro-batch must be at least 1 sample, got 0"),
    ],
)
def test_numbers_without_a_plan_are_named(batch: int, world: int, largest: int, message: str) -> None:
    """Both kinds of plan refuse the same numbers, and the message shows them."""
    for plan in (balanced_plan, uniform_plan):
        with pytest.raises(PlanError, match=re.escape(message)):
            plan(batch, world, largest)


@pytest.mark.parametrize("world", [1, 3, 1000])
def test_a_plan_too_long_to_list_is_refused_with_numbers_that_do(world: int) -> None:
    """The message names what was asked, the limit, and a batch and a size that make the longest plan allowed."""
    batch = 2**22 - 1
    with pytest.raises(PlanError, match=f"more than the {MOST_MICRO_BATCHES} that a plan may list") as refused:
        balanced_plan(batch, world, 1)
    shorter, larger = map(int, re.findall(r"at (?:most|least) (\d+)", str(refused.value))[-2:])
    for plan in (balanced_plan(shorter, world, 1), balanced_plan(batch, world, larger)):
        assert sum(map(len, plan.micro_batch_sizes)) <= MOST_MICRO_BATCHES
    for numbers in ((shorter + world, 1), (batch, larger - 1)):
        with pytest.raises(PlanError):
            balanced_plan(numbers[0], world, numbers[1])
