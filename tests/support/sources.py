"""The data of a spec, and what it is refused for."""

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData
from batchwright.training.data.build import build_data
from batchwright.workloads.build import build_workload


def built(spec: WorkloadSpec) -> TrainingData:
    """The data of a spec."""
    return build_data(spec, build_workload(spec))


def problem(spec: WorkloadSpec) -> tuple[str, str]:
    """The field that a spec's data is refused for, and the words."""
    with pytest.raises(SpecError) as caught:
        built(spec)
    return caught.value.problems[0].field, str(caught.value.problems[0])
