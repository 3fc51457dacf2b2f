"""From a spec to its data."""

from __future__ import annotations

from typing import assert_never

from tuner.specs import SyntheticData, TextData, WorkloadData, WorkloadSpec
from tuner.training.data.base import TrainingData, data_problem
from tuner.training.data.own import SyntheticSamples, join_batches, workload_data
from tuner.training.data.text import text_data
from tuner.workloads.base import Workload


def build_data(spec: WorkloadSpec, workload: Workload) -> TrainingData:
    """The data of a spec.

    Raises:
        SpecError: when there is none, when a path matches no file, or when it does not go with the model.
    """
    data = spec.data
    match data:
        case None:
            raise data_problem("data", "is required to train: `text` with paths, `synthetic`, or `workload`")
        case TextData():
            return text_data(data, spec, workload)
        case SyntheticData():
            return TrainingData(SyntheticSamples(workload, data.samples), join_batches)
        case WorkloadData():
            return workload_data(workload)
        case _:
            assert_never(data)
