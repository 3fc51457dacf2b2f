"""The auxiliary loss of a mixture of experts, which trains its routers to give every expert about as many tokens.

transformers computes this loss, ``aux_loss``, if the configuration sets ``output_router_logits``, and adds it to the
loss with a coefficient. The loss is a statistic of all tokens of a micro-batch, and not a sum over samples: with
accumulation, each micro-batch is balanced by itself. It is therefore a separate loss term, which the check for coupled
samples finds.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError, WorkloadError
from batchwright.workloads.config_fields import TransformersConfig
from batchwright.workloads.config_safety import configs_within

ROUTER_TERM = "router_aux_loss"
"""Name of the loss term."""
_SWITCHES = ("output_router_logits", "add_router_probs")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names of the coefficient in transformers configurations: Mixtral and most others, JetMoE, DBRX's ``ffn_config``."""
_LOSS_FUNCTION = "load_balancing_loss_func"
"""Function that every model with a router loss calls in its forward pass, as of transformers 5.23."""


def wants_router_loss(config: TransformersConfig) -> bool:
    """Return whether a configuration requests the routers' logits, and thus their loss."""
    return _router_field(config) is not None


def _router_field(config: TransformersConfig) -> str | None:
    """The path of the field that requests the routers' logits; None without one."""
    found = (
        f"{path}.{name}" for path, inner in configs_within(config) for name in _SWITCHES if getattr(inner, name, False)
    )
    return next(found, None)


def require_router_fields(fields: dict[str, Any], config: TransformersConfig) -> None:
    """Refuse a coefficient that would have no effect.

    Args:
        fields: the fields of the spec.
        config: the configuration built from the fields.

    Raises:
        SpecError: when the coefficient is not the default, and no field turns the router loss on or off.
    """
    default = type(config)()
    for name in _COEFFICIENTS:
        value = fields.get(name)
        if value and value != getattr(default, name, None) and not any(switch in fields for switch in _SWITCHES):
            message = f"has no effect unless `{_SWITCHES[0]}` is true: set that, or to false to train without it"
            raise SpecError([FieldProblem(f"model.config.{name}", message, str(value))])


def router_coefficient(config: TransformersConfig) -> float:
    """Coefficient of the routers' loss in the model's loss.

    Raises:
        SpecError: when the configuration has no coefficient.
    """
    for _, inner in configs_within(config):
        for name in _COEFFICIENTS:
            if name in vars(inner):
                return float(vars(inner)[name])
    raise router_loss_error(config, f"{type(config).__name__} has no coefficient for a router loss")


def require_router_loss(model: nn.Module) -> None:
    """Refuse a model whose configuration requests a router loss that transformers does not compute for this task.

    Raises:
        SpecError: naming the model's class.
    """
    forward = inspect.unwrap(type(model).forward)
    if _LOSS_FUNCTION not in forward.__code__.co_names or "labels" not in inspect.signature(forward).parameters:
        raise router_loss_error(model.config, f"{type(model).__name__} does not compute it")


def router_loss(output: Any) -> Tensor:  # noqa: ANN401 - a transformers.utils.ModelOutput
    """The routers' loss of a forward pass.

    Raises:
        WorkloadError: when the model has computed no router loss.
    """
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"the config sets `{_SWITCHES[0]}`, but this model returned no router loss (`aux_loss`): set it to false"
        )
    return loss


def router_loss_error(config: TransformersConfig, reason: str) -> SpecError:
    """Make the error for a router loss that is requested but would not be trained."""
    message = f"requests a router loss, which would not be trained: {reason}. Set it to false to train without"
    return SpecError([FieldProblem(f"model.{_router_field(config) or 'config'}", message, "True")])
