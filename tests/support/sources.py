"""The data of a spec, and what it is refused for."""

from __future__ import annotations

import pytest

from tuner.errors import SpecError
from tuner.schemas.workload import WorkloadSpec
from tuner.training.data import TrainingData, build_data
from tuner.workloads.build import build_workload


def built(spec: WorkloadSpec) -> TrainingData:
    """The data of a spec."""
    return build_data(spec, build_workload(spec))


def problem(spec: WorkloadSpec) -> tuple[str, str]:
    """The field that a spec's data is refused for, and the words."""
    with pytest.raises(SpecError) as caught:
        built(spec)
    return caught.value.problems[0].field, str(caught.value.problems[0])
