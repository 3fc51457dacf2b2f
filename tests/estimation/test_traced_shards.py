"""Traces of ranks that hold shards (FSDP2), against the arithmetic of shards."""

import pytest

from batchwright.estimation.trace import Category, Trace
from batchwright.estimation.tracing.session import trace
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.workload import WorkloadSpec
from tests.support.factories import gpt_spec

PROFILE = KernelProfile(compute_capability=(9, 0), kind="cuda")


def sharded(ranks: int, **changes: object) -> WorkloadSpec:
    """A small GPT over ``ranks`` ranks."""
    return gpt_spec(parallelism={"world_size": ranks, "strategy": "fsdp"}, **changes)


def held(taken: Trace, category: Category) -> int:
    """Bytes of a category between two updates."""
    total = 0
    for event in taken.events[: taken.position("measured-update")]:
        block = event if event >= 0 else ~event
        if taken.categories[block] is category:
            total += taken.sizes[block] if event >= 0 else -taken.sizes[block]
    return total


def peak(taken: Trace) -> int:
    """Peak bytes held."""
    most = now = 0
    for event in taken.events:
        now += taken.sizes[event] if event >= 0 else -taken.sizes[~event]
        most = max(most, now)
    return most


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_rank_holds_its_shard_of_everything_that_lasts(ranks: int) -> None:
    """Parameters and momentum are divided by the ranks; no gradients or gathered parameters stay between updates."""
    optimizer = {"name": "sgd", "momentum": 0.9}  # Adam counts its steps for each parameter, whole on every rank
    whole = trace(gpt_spec(optimizer=optimizer), 4, accumulates=True, profile=PROFILE)
    shard = trace(sharded(ranks, optimizer=optimizer), 4, accumulates=True, profile=PROFILE)
    for category in (Category.PARAMETERS, Category.OPTIMIZER_STATE):
        assert held(shard, category) == held(whole, category) // ranks
    assert held(shard, Category.GRADIENTS) == 0
    assert held(shard, Category.TEMPORARIES) < 64  # scalars with the rank's index


def test_layers_are_gathered_one_after_the_other() -> None:
    """A pass holds more than a shard, and less than an update of the whole model."""
    wide = {
        "model": {
            "kind": "reference",
            "architecture": {"name": "gpt", "layers": 4, "heads": 2, "width": 128, "vocabulary_size": 64},
        },
    }
    whole, shard = (
        trace(spec, 4, accumulates=True, profile=PROFILE) for spec in (gpt_spec(**wide), sharded(8, **wide))
    )
    lasting = held(shard, Category.PARAMETERS) + held(shard, Category.OPTIMIZER_STATE)
    assert lasting < peak(shard) < peak(whole)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"precision": "fp16-mixed", "gradient_clipping": 1.0},
        {"precision": "bf16-mixed", "activation_checkpointing": True, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_the_events_do_not_depend_on_the_size(changes: dict[str, object]) -> None:
    """The events are equal with a scaler, clipping, checkpointing and averages too, in first and later traces."""
    traces = [trace(sharded(2, **changes), size, accumulates=True, profile=PROFILE) for size in (4, 6, 10)]
    assert traces[0].events == traces[1].events == traces[2].events
    assert any("streams" in note for note in traces[0].notes)


def test_a_probe_of_shards_holds_the_whole_model() -> None:
    """A probe has one rank, so its search is seeded by the unsharded trace."""
    taken = trace(sharded(4), 4, accumulates=True, profile=PROFILE, shards=False)
    assert held(taken, Category.PARAMETERS) == held(
        trace(gpt_spec(), 4, accumulates=True, profile=PROFILE), Category.PARAMETERS
    )
