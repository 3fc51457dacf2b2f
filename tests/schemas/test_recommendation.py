"""A recommendation whose parts contradict each other is refused, with the field."""

from typing import Any

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.base import parse_document
from batchwright.schemas.recommendation import Recommendation
from tests.support.factories import recommendation


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"plan.micro_batch_sizes": []}, "plan.micro_batch_sizes", "a micro-batch for each rank"),
        ({"plan.micro_batch_sizes": [[]]}, "plan.micro_batch_sizes", "a micro-batch for each rank"),
        ({"plan.micro_batch_sizes": [[4, 3, 2]]}, "plan.micro_batch_sizes", "effective_batch_size, which is 10"),
        ({"plan.micro_batch_sizes": [[4, 3], [3]]}, "plan.micro_batch_sizes", "world_size, which is 1"),
        ({"plan.micro_batch_size": 5}, "plan.micro_batch_sizes", "micro_batch_size, which is 5"),
        ({"plan.gradient_accumulation_steps": 10**18}, "plan.micro_batch_sizes", "gradient_accumulation_steps, which"),
        ({"plan.world_size": 2}, "plan.micro_batch_sizes", "world_size, which is 2"),
        ({"plan.effective_batch_size": 11}, "plan.exact", "must be False"),
        ({"plan.requested_effective_batch_size": 11}, "plan.exact", "must be False"),
        ({"plan.exact": False}, "plan.exact", "must be True"),
        ({"plan": None}, "feasible", "there is no plan"),
        ({"feasible": False}, "feasible", "there is a plan"),
        ({"largest_micro_batch_size": 3}, "largest_micro_batch_size", "at least plan.micro_batch_size, 4"),
        ({"largest_micro_batch_size": None}, "largest_micro_batch_size", "at least plan.micro_batch_size, 4"),
        ({"evidence.proof.fits": 3}, "evidence", "proof.fits is 3"),
        ({"request.effective_batch_size": 12}, "request", "its effective_batch_size is 12, and that of the plan 10"),
    ],
)
def test_contradictions_are_refused_with_the_field(changes: dict[str, Any], field: str, words: str) -> None:
    """No job runs a plan that another part of its recommendation denies."""
    document: Any = recommendation().model_dump(mode="json")
    assert parse_document(Recommendation, document, "recommendation") == recommendation()
    for path, value in changes.items():
        *parents, name = path.split(".")
        inner = document
        for parent in parents:
            inner = inner[parent]
        inner[name] = value
    with pytest.raises(SpecError) as caught:
        parse_document(Recommendation, document, "recommendation")
    problem = caught.value.problems[0]
    assert problem.field == field
    assert words in problem.message
