"""Two ranks on gloo: the same gradient as one process, whatever each of them holds or meets."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from batchwright.training.accumulation.collectives import ProcessGroup, single_rank_group
from batchwright.training.accumulation.engine import GradientAccumulation
from tests.support import rank_scenarios
from tests.support.faults import bit_equal, relative_distance, relative_error
from tests.support.forked import run_two_ranks

Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of the two ranks, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(folder, rank_scenarios.main)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def error(outcome: dict[str, Any], name: str = "gradient") -> float:
    """The largest deviation from the truth, relative to its largest value."""
    gradient, truth = outcome[name].double(), outcome["truth"].double()
    return float((gradient - truth).abs().max() / truth.abs().max())


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal to the last bit."""
    return torch.equal(first, second)


def test_the_published_result_over_two_ranks(both: Outcomes) -> None:
    """16 samples over two ranks, two accumulation steps of 4 each: [0.2117, 0.3172]."""
    for outcome in both:
        assert outcome["published"]["weight"].tolist() == pytest.approx([0.2117, 0.3172], abs=5e-5)


@pytest.mark.parametrize(
    "scenario",
    [
        "uneven_ranks",
        "unknown_weights",
        "rank_without_tokens",
        "rank_without_samples",
        "one_rank_runs_out",
        "rank_fails",
        "wrapped_in_ddp",
    ],
)
def test_the_gradient_is_the_full_batchs(both: Outcomes, scenario: str) -> None:
    """The gradient is within 1e-5 of one process in fp64, and equal to the last bit on both ranks."""
    assert [error(outcome[scenario]) < 1e-5 for outcome in both] == [True, True]
    assert same(both[0][scenario]["gradient"], both[1][scenario]["gradient"])


@pytest.mark.parametrize("mutant", ["wrong_world_factor", "missing_world_factor"])
def test_mutants_are_caught(both: Outcomes, mutant: str) -> None:
    """Averages where sums belong miss by far: the test above can fail."""
    assert error(both[0][mutant]) > 1e-2


def test_a_rank_without_samples_needs_no_weights_beforehand(both: Outcomes) -> None:
    """The rank does not know the names of the terms."""
    assert error(both[1]["rank_without_samples"], "again") < 1e-5


def test_reports_are_those_of_all_ranks(both: Outcomes) -> None:
    """Loss and weights are the whole window's on each rank."""
    assert both[0]["uneven_ranks"]["loss"] == both[1]["uneven_ranks"]["loss"]
    assert both[0]["uneven_ranks"]["weights"] == both[1]["unknown_weights"]["weights"]


def test_a_window_that_weighs_nothing_anywhere_is_skipped(both: Outcomes) -> None:
    """Both ranks skip the window."""
    assert [outcome["no_rank_has_tokens"]["skipped"] for outcome in both] == [True, True]


def test_one_rank_splits_alone(both: Outcomes) -> None:
    """Rank 1 continues in single samples while rank 0 keeps its micro-batches; both report the splits."""
    first, second = (outcome["one_rank_runs_out"] for outcome in both)
    assert (first["sizes"], second["sizes"]) == ((4, 1), (1, 1, 1))
    assert first["splits"] == second["splits"] == [(1, 3, (2, 1)), (1, 2, (1, 1))]


def test_a_parameter_that_no_rank_used_keeps_no_gradient(both: Outcomes) -> None:
    """And AdamW does not decay it; one that a single rank used is stepped on both, to the same value."""
    for outcome in both:
        seen = outcome["partly_used_parameters"]
        assert [name for name, gradient in seen["gradients"].items() if gradient is None] == ["nobody"]
        assert seen["changed"] == {"everybody": True, "rank_0": True, "nobody": False}
    pairs = zip(*(outcome["partly_used_parameters"]["weights"] for outcome in both), strict=True)
    assert all(same(*pair) for pair in pairs)


def test_the_failure_of_a_rank_reaches_the_other(both: Outcomes) -> None:
    """The failed rank raises its own error, and the other an error with its message."""
    assert both[1]["rank_fails"]["error"] == "ValueError: no such label"
    assert both[0]["rank_fails"]["error"] == "PeerError: rank 1 failed: ValueError: no such label"


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        ("running_statistics", "buffers"),
        ("running_statistics", "weights"),
        ("wrapped_with_statistics", "buffers"),
        ("wrapped_with_statistics", "weights"),
        ("frozen_layers", "weights"),
        ("scaled_without_samples", "weights"),
        ("odd_buffers", "weights"),
    ],
)
def test_the_ranks_stay_together(both: Outcomes, scenario: str, what: str) -> None:
    """Buffers and weights are equal on both, whichever of them had samples and however they were seeded."""
    pairs = zip(*(outcome[scenario][what] for outcome in both), strict=True)
    assert all(same(*pair) for pair in pairs)


def test_an_overflow_on_one_rank_skips_the_step_on_both(both: Outcomes) -> None:
    """The scale is halved once on each."""
    for outcome in both:
        assert outcome["overflow_on_one_rank"] == {"skipped": True, "scale": 512.0, "same": True}


def test_a_group_of_one_reduces_in_buckets_as_many_do() -> None:
    """A probe of a distributed run stands alone, and must hold the buckets that the run will hold."""
    ranks = single_rank_group(torch.device("cpu"))
    reduced: list[int] = []
    try:
        assert isinstance(ranks, ProcessGroup)
        ranks._all_reduce = lambda tensor: reduced.append(tensor.numel())  # type: ignore[method-assign]
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
        accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters()), ranks=ranks)
        accumulation.update([torch.ones(3, 8)], lambda net, batch: (net(batch).sum(), 3.0))
    finally:
        ranks.close()
    assert reduced == [8 * 4 + 4 + 4 + 1]


def test_tensors_of_all_sizes_are_summed(both: Outcomes) -> None:
    """Small ones in buckets, large ones where they are, whatever their type and layout."""
    expected = [
        *(torch.full((3, 5), 2.0 * i + 1) for i in range(4)),
        torch.full((7,), 3.0),
        torch.full((4,), 3.0, dtype=torch.float64),
        torch.arange(6.0).view(2, 3).t() * 3,
    ]
    for outcome in both:
        assert all(same(a, b) for a, b in zip(outcome["sums_of_all_sizes"]["tensors"], expected, strict=True))


def test_shards_give_the_weights_of_one_process(both: Outcomes) -> None:
    """Two clipped AdamW updates under FSDP, one rank with a padding micro-batch: within 1e-5 of a whole model."""
    for outcome in both:
        seen = outcome["in_shards"]
        assert relative_distance(seen["weights"], seen["truth"]) < 1e-5


def test_a_plan_gives_shards_as_many_micro_batches_on_every_rank(both: Outcomes) -> None:
    """In a short last window too, where rank 1 has one sample and a padding micro-batch."""
    assert [outcome["planned_shards"]["sizes"] for outcome in both] == [[(2, 1), (2, 1)], [(1, 1), (1,)]]
    for outcome in both:
        assert relative_distance(outcome["planned_shards"]["weights"], outcome["planned_shards"]["truth"]) < 1e-5


def test_shards_in_bf16_are_summed_in_fp32(both: Outcomes) -> None:
    """The sums of 64 micro-batches are those of one process, but for the rounding of each pair of ranks' gradients."""
    for outcome in both:
        seen = outcome["narrow_shards"]
        assert seen["types"] == {(torch.float32, torch.bfloat16)}
        error = (seen["sums"] - seen["truth"]).norm() / seen["truth"].norm()
        assert float(error) < 0.002  # added up in bf16: above 0.01


def test_shards_go_into_a_checkpoint_whole_and_come_back(both: Outcomes) -> None:
    """Weights and optimizer state, by the numbers that a whole model gives them, bit for bit."""
    seen = both[0]["in_shards"]
    assert all(same(seen["resumed"][name], tensor) for name, tensor in seen["weights"].items())
    assert seen["state"]["param_groups"] == seen["state_truth"]["param_groups"]
    for number, values in seen["state"]["state"].items():
        assert bit_equal(values, seen["again"]["state"][number])
        assert relative_error(values, seen["state_truth"]["state"][number]) < 1e-3


def test_shards_that_average_are_refused(both: Outcomes) -> None:
    """Both ranks name the divisor and the call that sets it, whether it was set to two or never set."""
    for outcome in both:
        message = outcome["shards_that_average"]["message"]
        assert re.search(r"FSDP divides the gradients of .* by 2 .*set_gradient_divide_factor\(1\.0\)", message)


@pytest.mark.parametrize("scenario", ["noise_of_both_ranks", "noise_of_one_micro_batch_each", "noise_of_shards"])
def test_gradient_noise_over_ranks_is_that_of_one_process(both: Outcomes, scenario: str) -> None:
    """Each rank's part is compared with the whole, as one process in fp64 does it, alike on both ranks."""
    assert both[0][scenario]["found"] == both[1][scenario]["found"]
    for found in both[0][scenario]["found"]:
        assert found == pytest.approx(both[0][scenario]["truth"], rel=1e-4)
