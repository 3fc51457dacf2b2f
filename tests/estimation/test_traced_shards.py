"""Traces of ranks that hold shards (FSDP2), against the arithmetic of shards."""

from __future__ import annotations

import pytest

from tests.support.factories import gpt_spec
from tuner.estimation.trace import Category, Trace
from tuner.estimation.tracing.session import trace
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.workload import WorkloadSpec

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
    """Most bytes held at once."""
    most = now = 0
    for event in taken.events:
        now += taken.sizes[event] if event >= 0 else -taken.sizes[~event]
        most = max(most, now)
    return most


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_shard_of_everything_that_lasts(ranks: int) -> None:
    """Parameters and momentum, each divided by the ranks; no gradient and nothing gathered between updates."""
    optimizer = {"name": "sgd", "momentum": 0.9}  # Adam counts its steps for each parameter, whole on every rank
    whole = trace(gpt_spec(optimizer=optimizer), 4, accumulates=True, profile=PROFILE)
    shard = trace(sharded(ranks, optimizer=optimizer), 4, accumulates=True, profile=PROFILE)
    for category in (Category.PARAMETERS, Category.OPTIMIZER_STATE):
        assert held(shard, category) == held(whole, category) // ranks
    assert held(shard, Category.GRADIENTS) == 0
    assert held(shard, Category.TEMPORARIES) < 64  # scalars that tell a rank its place


def test_blocks_are_gathered_one_after_the_other() -> None:
    """More than a shard is held while a pass runs, and less than the whole model's update takes."""
    wide = {
        "model": {
            "kind": "reference",
            "architecture": {"name": "gpt", "layers": 6, "heads": 2, "width": 128, "vocabulary_size": 64},
        },
    }
    whole, shard = (trace(it, 4, accumulates=True, profile=PROFILE) for it in (gpt_spec(**wide), sharded(8, **wide)))
    lasting = held(shard, Category.PARAMETERS) + held(shard, Category.OPTIMIZER_STATE)
    assert lasting < peak(shard) < peak(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp16-mixed", "gradient_clipping": 1.0},
        {"precision": "bf16-mixed", "activation_checkpointing": True, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_the_events_do_not_depend_on_the_size(changes: dict[str, object]) -> None:
    """With a scaler, clipping, checkpointing and averages too, and in the first trace of a process as in later ones."""
    traces = [trace(sharded(2, **changes), size, accumulates=True, profile=PROFILE) for size in (4, 6, 10)]
    assert traces[0].events == traces[1].events == traces[2].events
    assert any("streams" in note for note in traces[0].notes)


def test_a_probe_of_shards_holds_the_whole_model() -> None:
    """It stands alone: what leads its search is the unsharded trace."""
    taken = trace(sharded(4), 4, accumulates=True, profile=PROFILE, shards=False)
    assert held(taken, Category.PARAMETERS) == held(
        trace(gpt_spec(), 4, accumulates=True, profile=PROFILE), Category.PARAMETERS
    )
