"""Compare a model and its optimizer with what the probes of a recommendation measured."""

from collections.abc import Iterator

import torch
from torch import nn

from batchwright.errors import FieldProblem
from batchwright.exports.spec_advice import torch_call
from batchwright.schemas.optimizer import OptimizerSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.workload import PythonModel

_ADD_STATE = ("momentum", "amsgrad", "centered")
"""Arguments of optimizers that add a value per parameter."""


def model_problems(recommendation: Recommendation, model: nn.Module) -> Iterator[FieldProblem]:
    """Differences of number and type of the parameters, which take memory; the model is built, and not sharded."""
    expected = torch.bfloat16 if recommendation.request.workload.precision == "bf16" else torch.float32
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = sorted({str(parameter.dtype) for parameter in trained if parameter.dtype is not expected})
    if others:
        yield FieldProblem("model", f"must have trainable parameters in {expected}", ", ".join(others))
    summaries = [probe.model for probe in recommendation.evidence.probes if probe.model is not None]
    if not summaries:
        return
    measured = summaries[-1]
    for name, count, wanted in (
        ("parameters", sum(parameter.numel() for parameter in model.parameters()), measured.parameters),
        ("trainable parameters", sum(parameter.numel() for parameter in trained), measured.trainable_parameters),
    ):
        if count != wanted:
            yield FieldProblem("model", f"must have {wanted} {name}, like the model that was probed", str(count))


def optimizer_problem(
    recommendation: Recommendation, optimizer: torch.optim.Optimizer, device: torch.device
) -> str | None:
    """Describe how the optimizer differs from the one that was probed in what takes memory; None where it does not.

    State and temporaries depend on the class, its implementation, momentum, and the arguments that add a value per
    parameter. A ``python`` workload may have been probed with an optimizer of its own, which the spec does not name:
    there only an optimizer that the spec names is compared.
    """
    spec = recommendation.request.workload.optimizer
    if isinstance(recommendation.request.workload.model, PythonModel) and spec == OptimizerSpec():
        return None
    group = optimizer.param_groups[0]
    wanted = spec.torch_arguments()
    same_class = type(optimizer).__name__ == spec.torch_class
    same_state = all(bool(group.get(name)) == bool(wanted.get(name)) for name in _ADD_STATE)
    if same_class and same_state and _implementation(group, spec, device) == spec.implementation_on(device.type):
        return None
    return f"{type(optimizer).__name__} ({_implementation(group, spec, device)}) instead of `{torch_call(spec)}`"


def _implementation(group: dict[str, object], spec: OptimizerSpec, device: torch.device) -> str:
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None:
        return spec.model_copy(update={"implementation": "default"}).implementation_on(device.type)
    return "foreach" if foreach else "for-loop"
