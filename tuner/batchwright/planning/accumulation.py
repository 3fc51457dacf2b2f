"""The arithmetic of gradient accumulation. Pure, no torch.

Given an effective batch ``B`` over ``W`` ranks and the largest micro-batch ``m``:

* a rank's share is ``B // W`` or one more (the first ``B % W`` ranks take the extra sample);
* the accumulation steps are ``ceil(largest share / m)``, the fewest possible, and the same on every rank so that ranks
  that must move in step can (a rank with fewer samples than steps, at ``m = 1``, makes a step less);
* the sizes of a rank differ by at most one (100 at most 37 at a time is 34 + 33 + 33, never 37 + 37 + 26), which keeps
  the peak memory of the run as low as the number of steps allows.

A probe runs a few micro-batches in the place of an update's: ``probe_window`` says which.
"""

from collections import Counter

from batchwright.arithmetic import divisors
from batchwright.errors import PlanError
from batchwright.schemas.plans import Plan, ReachableBatch, UniformPlan
from batchwright.schemas.requests import LARGEST_EFFECTIVE_BATCH_SIZE, ProbeRequest
from batchwright.units import counted

MOST_MICRO_BATCHES = 2**18
"""Most micro-batches of an update over all ranks. A plan lists each: half a megabyte, written and read within 0.1 s."""
_MOST_REPEATED = 2
"""Micro-batches of one size that a probe of a plan runs in an update."""
_MOST_TIMED = 4
"""Micro-batches of a timed update: some that are followed by another, and the last, followed by the optimizer step."""
_POOR_FILL = 0.5
"""A uniform micro-batch under half of what fits wastes the device; nearby effective batches are then offered."""


def share_per_rank(effective_batch_size: int, world_size: int) -> tuple[int, ...]:
    """Samples of each rank in one update: they sum to the effective batch and differ by at most one.

    Raises:
        PlanError: when a rank would have no sample.
    """
    if effective_batch_size < 1 or world_size < 1:
        raise PlanError(
            f"effective batch size and world size must be at least 1, got {effective_batch_size} and {world_size}"
        )
    if effective_batch_size > LARGEST_EFFECTIVE_BATCH_SIZE:
        raise PlanError(
            f"an effective batch of {effective_batch_size} is above {LARGEST_EFFECTIVE_BATCH_SIZE}: a plan lists every "
            "micro-batch of an update"
        )
    if effective_batch_size < world_size:
        raise PlanError(
            f"an effective batch of {effective_batch_size} leaves {world_size - effective_batch_size} of {world_size} "
            f"ranks without a sample: use at most {effective_batch_size} ranks, or a batch of at least {world_size}"
        )
    return balanced_split(effective_batch_size, world_size)


def steps_of(share: int, size: int) -> int:
    """The accumulation steps of a plan whose micro-batches have at most ``size`` samples."""
    return -(-share // size)


def plan_size(share: int, steps: int) -> int:
    """The largest micro-batch of the balanced plan with this many steps."""
    return -(-share // steps)


def balanced_split(samples: int, parts: int) -> tuple[int, ...]:
    """Split ``samples`` into ``parts`` whole numbers that differ by at most one, the larger ones first.

    ``parts`` above ``samples`` gives one part a sample: a micro-batch is never empty.
    """
    parts = min(parts, samples)
    if parts < 1:
        return ()
    size, larger = divmod(samples, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def probe_window(request: ProbeRequest) -> tuple[int, ...]:
    """The sizes of the micro-batches that a probe runs in each update, in order.

    A probe of a size runs two whole micro-batches of it, even where a rank has fewer samples: the worst case of every
    plan whose micro-batches are not larger. Where the size is a rank's whole share, it is the only micro-batch. A probe
    of a plan runs its ``plan_window``, and a probe that measures time some of its micro-batches, selected evenly.
    """
    size, share = request.micro_batch_size, request.samples_per_window
    if request.measures_time:
        sizes = balanced_split(share, steps_of(share, size))
        count = min(_MOST_TIMED, len(sizes))
        return tuple(sizes[index * (len(sizes) - 1) // max(1, count - 1)] for index in range(count))
    if request.runs_plan:
        return plan_window(share, steps_of(share, size))
    return (size, size) if request.accumulates else (size,)


def plan_window(share: int, steps: int) -> tuple[int, ...]:
    """A short window with the same peak as the plan ``balanced_split(share, steps)``, in the order of training.

    At most two micro-batches of each size, since the third meets the same memory as the second.
    """
    size, larger = divmod(share, min(steps, share))
    counts = {size + 1: larger, size: min(steps, share) - larger}
    return tuple(size for size, count in counts.items() for _ in range(min(count, _MOST_REPEATED)))


def condensed(window: tuple[int, ...]) -> tuple[int, ...]:
    """The micro-batches of an update with no size more than twice, as in ``plan_window``."""
    return tuple(size for size, count in Counter(window).items() for _ in range(min(count, _MOST_REPEATED)))


def is_as_demanding(ran: tuple[int, ...], window: tuple[int, ...]) -> bool:
    """Return whether an update of ``ran`` needs at least as much memory as one of ``window``.

    It does if both are the same once condensed, or if each repeats one size, that of ``ran`` is not smaller, and
    ``ran`` holds gradients while a micro-batch runs unless ``window`` does not either. Nothing but its own run is known
    to be as demanding as a window of two sizes: an allocator that keeps its blocks may reserve more for micro-batches
    of two sizes than for equal ones of the larger size.
    """
    if condensed(ran) == condensed(window):
        return True
    if len(set(ran)) != 1 or len(set(window)) != 1:
        return False
    return ran[0] >= window[0] and (len(ran) > 1 or len(window) == 1)


def balanced_plan(effective_batch_size: int, world_size: int, max_micro_batch_size: int) -> Plan:
    """The plan that gives exactly the effective batch in the fewest steps, in the most even sizes.

    Raises:
        PlanError: when a number is below 1, a rank would have no sample, or the plan would list too many micro-batches.
    """
    check_listable(effective_batch_size, world_size, max_micro_batch_size)
    shares = share_per_rank(effective_batch_size, world_size)
    steps = steps_of(shares[0], max_micro_batch_size)
    sizes = tuple(balanced_split(share, steps) for share in shares)
    return Plan(
        gradient_accumulation_steps=steps,
        micro_batch_size=sizes[0][0],
        world_size=world_size,
        effective_batch_size=effective_batch_size,
        requested_effective_batch_size=effective_batch_size,
        exact=True,
        micro_batch_sizes=sizes,
    )


def repeated_plan(effective_batch_size: int, world_size: int, size: int) -> Plan:
    """The plan that repeats one micro-batch size, which divides the samples of a rank.

    Raises:
        PlanError: when the ranks do not divide the batch, or the size not their samples.
    """
    check_divisible(effective_batch_size, world_size)
    share = effective_batch_size // world_size
    if share % size:
        raise PlanError(f"micro-batches of {size} samples do not divide the {share} samples of a rank")
    steps = share // size
    return Plan(
        gradient_accumulation_steps=steps,
        micro_batch_size=size,
        world_size=world_size,
        effective_batch_size=effective_batch_size,
        requested_effective_batch_size=effective_batch_size,
        exact=True,
        micro_batch_sizes=((size,) * steps,) * world_size,
    )


def check_divisible(effective_batch_size: int, world_size: int) -> None:
    """Refuse an effective batch that ranks which repeat one size cannot reach.

    Raises:
        PlanError: with the nearest batches that they reach; also when a rank would have no sample.
    """
    share_per_rank(effective_batch_size, world_size)
    rest = effective_batch_size % world_size
    if rest:
        below = effective_batch_size - rest
        raise PlanError(
            f"an effective batch of {effective_batch_size} cannot be split evenly over {world_size} ranks "
            f"that repeat one micro-batch size: use {below} or {below + world_size}"
        )


def divisors_up_to(share: int, bound: int, granularity: int = 1) -> tuple[int, ...]:
    """The sizes that divide ``share``, rising up to ``bound``: multiples of ``granularity``, or 1 where none is."""
    return tuple(size for size in divisors(share) if size <= bound and size % granularity == 0) or (1,)


def sizes_for_steps(share: int, bound: int, granularity: int = 1) -> tuple[int, ...]:
    """The sizes at which the number of accumulation steps changes: the smallest size for each number, rising.

    Args:
        share: samples of a rank in an update.
        bound: the largest size, at most ``share``.
        granularity: only multiples of it count (``bound`` itself where that is smaller).
    """
    granularity = min(granularity, bound)
    size = bound // granularity * granularity
    found: list[int] = []
    while size > 0:
        smallest = -(-plan_size(share, steps_of(share, size)) // granularity) * granularity
        found.append(smallest)
        size = smallest - granularity
    return tuple(reversed(found))


def check_listable(effective_batch_size: int, world_size: int, max_micro_batch_size: int) -> None:
    """Refuse numbers whose balanced plan would list more than ``MOST_MICRO_BATCHES``, without building the plan.

    Raises:
        PlanError: with numbers that are possible; also when a number is below 1 or a rank would have no sample.
    """
    _require_size(max_micro_batch_size)
    share = share_per_rank(effective_batch_size, world_size)[0]
    listed = world_size * steps_of(share, max_micro_batch_size)
    if listed > MOST_MICRO_BATCHES:
        most_steps = MOST_MICRO_BATCHES // world_size
        raise PlanError(
            f"an effective batch of {effective_batch_size} over {counted(world_size, 'rank')} takes {listed} "
            f"micro-batches of at most {max_micro_batch_size}, more than the {MOST_MICRO_BATCHES} that a plan "
            f"may list: use an effective batch of at most {world_size * most_steps * max_micro_batch_size}, "
            f"or micro-batches of at least {-(-share // most_steps)}"
        )


def uniform_plan(effective_batch_size: int, world_size: int, max_micro_batch_size: int) -> UniformPlan:
    """The best plan that repeats one micro-batch size on every rank.

    Exact with the largest divisor of the share that fits, where the ranks divide the batch evenly; otherwise the
    nearest effective batch that is reachable, with ``exact`` false. Never a silent change.

    Raises:
        PlanError: when a number is below 1 or a rank would have no sample.
    """
    _require_size(max_micro_batch_size)
    share_per_rank(effective_batch_size, world_size)
    nearest = _nearest(effective_batch_size, world_size, max_micro_batch_size)
    share, rest = divmod(effective_batch_size, world_size)
    if rest:
        chosen = min(nearest, key=lambda batch: abs(batch.effective_batch_size - effective_batch_size))
    else:
        size = divisors_up_to(share, max_micro_batch_size)[-1]
        chosen = ReachableBatch(
            effective_batch_size=effective_batch_size, micro_batch_size=size, gradient_accumulation_steps=share // size
        )
    exact = chosen.effective_batch_size == effective_batch_size
    fullest = min(max_micro_batch_size, -(-effective_batch_size // world_size))
    show_nearest = not exact or chosen.micro_batch_size < _POOR_FILL * fullest
    return UniformPlan(
        gradient_accumulation_steps=chosen.gradient_accumulation_steps,
        micro_batch_size=chosen.micro_batch_size,
        world_size=world_size,
        effective_batch_size=chosen.effective_batch_size,
        requested_effective_batch_size=effective_batch_size,
        exact=exact,
        change=_describe_change(chosen, effective_batch_size, world_size, max_micro_batch_size),
        nearest=nearest if show_nearest else (),
    )


def _require_size(max_micro_batch_size: int) -> None:
    if max_micro_batch_size < 1:
        raise PlanError(f"the largest micro-batch must be at least 1 sample, got {max_micro_batch_size}")


def _nearest(batch: int, ranks: int, largest: int) -> tuple[ReachableBatch, ...]:
    """The nearest reachable effective batches, one at or below ``batch`` and one above, with large micro-batches.

    With ``steps`` micro-batches per rank the reachable batches are the multiples of ``steps * ranks``; the steps tried
    are the fewest that hold the batch, one fewer and one more.
    """
    fewest = -(-batch // (ranks * largest))
    candidates = [
        ReachableBatch(
            effective_batch_size=size * steps * ranks, micro_batch_size=size, gradient_accumulation_steps=steps
        )
        for steps in (fewest - 1, fewest, fewest + 1)
        if steps >= 1
        for size in (min(largest, batch // (steps * ranks)), batch // (steps * ranks) + 1)
        if 1 <= size <= largest
    ]
    below = [candidate for candidate in candidates if candidate.effective_batch_size <= batch]
    above = [candidate for candidate in candidates if candidate.effective_batch_size > batch]
    closest = [
        min(side, key=lambda near: (abs(near.effective_batch_size - batch), near.gradient_accumulation_steps))
        for side in (below, above)
        if side
    ]
    return tuple(closest)


def _describe_change(chosen: ReachableBatch, batch: int, ranks: int, largest: int) -> str:
    fewest = steps_of(share_per_rank(batch, ranks)[0], largest)
    achieved, steps = chosen.effective_batch_size, chosen.gradient_accumulation_steps
    if achieved != batch:
        return (
            f"The effective batch becomes {achieved} instead of {batch} ({achieved - batch:+d}): {ranks} ranks that "
            f"repeat one size cannot reach {batch}."
        )
    if steps == fewest:
        return f"No change: {ranks} x {steps} x {chosen.micro_batch_size} is exactly {batch}."
    return (
        f"{steps} accumulation steps instead of {fewest}: {chosen.micro_batch_size} is the largest size up to "
        f"{largest} that divides the {batch // ranks} samples of a rank."
    )
