"""A loop of one's own trains with a plan: its sizes, its effective batch, and never more samples than that."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.planning.accumulation import balanced_plan
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.accumulation.planned_window import PlannedWindow
from batchwright.training.micro_batches.splitting import as_micro_batch, windows
from tests.support.faults import (
    CountingGpt,
    Faults,
    exact_gradient,
    out_of_memory,
    ragged_tokens,
    relative_error,
    steps_of,
    times_committed,
    token_batch,
    token_batches,
    token_loss,
)

SAMPLES = ragged_tokens(10, longest=8)
PLAN = balanced_plan(effective_batch_size=10, world_size=1, max_micro_batch_size=4)  # 4 + 3 + 3
BATCH = token_batch(SAMPLES)
both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])


class Loop:
    """A loop over one batch of all samples, with the sizes that the loss has seen."""

    def __init__(self, gathering: Gathering = "scratch") -> None:
        self.model = CountingGpt(len(SAMPLES))
        self.truth = exact_gradient(self.model, BATCH, token_loss)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.steps = steps_of(optimizer, self.model)
        self.accumulation = GradientAccumulation(
            self.model, optimizer, plan=PLAN, gathering=gathering, checks_coupling=False
        )
        self.seen: list[int] = []

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """The loss of tokens, which notes the samples of each micro-batch."""
        self.seen.append(len(batch["sample"]))
        return token_loss(model, batch)


@both_gatherings
def test_one_batch_is_divided_as_the_plan_says(gathering: Gathering) -> None:
    """Sizes, gradient, and each sample once."""
    loop = Loop(gathering)
    report = loop.accumulation.update([BATCH], loop.loss)
    assert loop.seen == [4, 3, 3]
    assert report.micro_batch_sizes == PLAN.micro_batch_sizes[0]
    assert relative_error(loop.steps[-1], loop.truth) < 1e-5
    assert times_committed(loop.steps[-1], SAMPLES) == [1] * len(SAMPLES)


def test_a_last_batch_may_be_short_and_is_divided_within_the_plans_largest() -> None:
    """Seven of ten samples, as at the end of an epoch."""
    loop = Loop()
    loop.accumulation.update([token_batch(SAMPLES, 0, 7)], loop.loss)
    assert loop.seen == [4, 3]


def test_micro_batches_of_ones_own_run_as_they_are() -> None:
    """A loader may make its own sizes, as long as they fit the plan."""
    loop = Loop()
    loop.accumulation.update(token_batches(SAMPLES, 2, 4, 4), loop.loss)
    assert loop.seen == [2, 4, 4]


def test_a_loader_of_the_plans_largest_size_would_make_the_update_too_large() -> None:
    """Three micro-batches of 4 are 12 samples, and the plan's effective batch is 10."""
    loop = Loop()
    loader = [token_batch(SAMPLES, 0, 4)] * 6
    window = next(windows(loader, PLAN.gradient_accumulation_steps))
    with pytest.raises(WorkloadError, match=r"4 \+ 4 \+ 4 = 12 samples, but the plan has 10 .* one batch of 10"):
        loop.accumulation.update(window, loop.loss)
    assert loop.seen == []
    loop.accumulation.update([BATCH], loop.loss)  # the loop can go on
    assert relative_error(loop.steps[-1], loop.truth) < 1e-5


def test_padding_is_no_sample_of_a_window() -> None:
    """Neither in the sum nor in its terms."""
    padding = replace(as_micro_batch(torch.arange(4)), is_padding=True)
    planned = PlannedWindow(PLAN, Ranks())
    assert planned.divide([as_micro_batch(torch.arange(4)), padding, padding])[1:] == [padding, padding]
    with pytest.raises(WorkloadError, match=r"the window has 6 \+ 5 = 11 samples"):
        planned.divide([as_micro_batch(torch.arange(6)), as_micro_batch(torch.arange(5)), padding])


@pytest.mark.parametrize(
    ("samples", "sizes", "padding"), [(10, [4, 3, 3], 0), (7, [3, 2, 2], 0), (2, [1, 1], 1), (1, [1], 2)]
)
def test_in_lock_step_a_window_has_all_steps(samples: int, sizes: list[int], padding: int) -> None:
    """However few samples the last batch of an epoch has on this rank."""
    parts = PlannedWindow(PLAN, Ranks(), lock_step=True).divide([as_micro_batch(torch.arange(samples))])
    assert [part.size for part in parts if not part.is_padding] == sizes
    assert [part.is_padding for part in parts] == [False] * len(sizes) + [True] * padding


def test_in_lock_step_a_rank_without_samples_runs_padding_in_all_steps() -> None:
    """The model's collectives need each rank in each of the three steps."""
    padding = replace(as_micro_batch(torch.arange(1)), is_padding=True)
    assert PlannedWindow(PLAN, Ranks(), lock_step=True).divide([padding]) == [padding] * 3


@both_gatherings
def test_a_planned_micro_batch_that_does_not_fit_is_divided_further(gathering: Gathering) -> None:
    """The effective batch stays, in smaller parts."""
    loop = Loop(gathering)
    Faults(loop.model, out_of_memory).fail("backward of gpt.blocks.0.query_key_value", 0)
    report = loop.accumulation.update([BATCH], loop.loss)
    assert [split.size for split in report.splits] == [4]
    assert max(report.micro_batch_sizes) <= 2
    assert sum(report.micro_batch_sizes) == PLAN.effective_batch_size
    assert relative_error(loop.steps[-1], loop.truth) < 1e-5


def test_a_plan_for_other_ranks_is_refused() -> None:
    """The loop would otherwise train with a part of the effective batch."""
    model = nn.Linear(1, 1)
    plan = balanced_plan(effective_batch_size=10, world_size=2, max_micro_batch_size=4)
    with pytest.raises(WorkloadError, match="plan is for 2 ranks, and this loop has 1: pass `ranks=ProcessGroup"):
        GradientAccumulation(model, torch.optim.SGD(model.parameters()), plan=plan)


def test_each_rank_has_its_own_share() -> None:
    """Rank 1 of 2 in an update of 9 samples."""
    plan = balanced_plan(effective_batch_size=9, world_size=2, max_micro_batch_size=2)
    ranks = Ranks()
    ranks.size, ranks.rank = 2, 1
    planned = PlannedWindow(plan, ranks)
    assert planned.sizes == (2, 1, 1)  # as many micro-batches as rank 0, which has 2 + 2 + 1
    parts = planned.divide([as_micro_batch(torch.arange(4))])
    assert [part.size for part in parts] == [2, 1, 1]
    assert torch.cat([part.batch for part in parts]).tolist() == [0, 1, 2, 3]
    with pytest.raises(WorkloadError, match="5 = 5 samples, but the plan has 4"):
        planned.divide([as_micro_batch(torch.arange(5))])


def test_a_batch_of_unknown_samples_is_refused() -> None:
    """A batch instead of a list would run as one micro-batch of any size, whatever the plan says."""

    class Samples:
        def __init__(self) -> None:
            self.rows = torch.ones(10, 2)

    model = nn.Linear(2, 1)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters()), plan=PLAN)
    with pytest.raises(
        WorkloadError, match=r"the plan cannot be followed: a batch of type Samples .*`batchwright.MicroBatch`"
    ):
        accumulation.update([Samples()], lambda model, batch: (model(batch.rows).sum(), len(batch.rows)))
