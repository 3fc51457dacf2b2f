"""Recommendations to export: of any plan, with whatever strings a user may have put into them."""

from typing import Any

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import WorkloadSpec
from tests.support.factories import CUDA, gpt_spec, recommendation


def plan(
    effective_batch_size: int,
    world_size: int = 1,
    largest_micro_batch_size: int = 8,
    spec: WorkloadSpec | None = None,
    **changes: Any,
) -> Recommendation:
    """The recommendation of a small GPT on a card, with the balanced plan of these numbers."""
    return recommendation(
        spec or gpt_spec(),
        effective_batch_size,
        largest_micro_batch_size,
        world_size=world_size,
        **{"device": CUDA, **changes},
    )


def command_plan(*argv: str, world_size: int = 1, device: DeviceInfo = CUDA, **fields: Any) -> Recommendation:
    """The recommendation of a command, with two micro-batches of 8 samples on each rank.

    Args:
        argv: the command.
        world_size: its ranks.
        device: the device of the recommendation.
        fields: further fields of the command.
    """
    model = {"kind": "command", "argv": argv, **fields}
    spec = {"model": model, "parallelism": {"world_size": world_size}}
    request = TuningRequest.model_validate({"spec": spec, "effective_batch_size": 16 * world_size})
    return plan(16 * world_size, world_size, 8, device=device).model_copy(update={"request": request})


def infeasible() -> Recommendation:
    """A recommendation that says that nothing fits."""
    return plan(16).model_copy(
        update={
            "id": "rec_infeasible",
            "feasible": False,
            "infeasible_reason": "Not even one sample fits into 1.0 GiB.",
            "plan": None,
            "largest_micro_batch_size": None,
            "headroom": None,
        }
    )
