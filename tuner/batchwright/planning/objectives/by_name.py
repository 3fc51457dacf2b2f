"""Find the objective of a request. Pure, no torch."""

from batchwright.planning.objectives.fastest import Fastest
from batchwright.planning.objectives.fewest_steps import FewestSteps
from batchwright.planning.objectives.largest import LargestMicroBatch
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.schemas.requests import Objective, TuningRequest

_OBJECTIVES: dict[Objective, ObjectiveStrategy] = {
    "largest": LargestMicroBatch(),
    "fewest_steps": FewestSteps(),
    "fastest": Fastest(),
}


def objective_of(request: TuningRequest) -> ObjectiveStrategy:
    """The objective of a request."""
    return _OBJECTIVES[request.objective]
