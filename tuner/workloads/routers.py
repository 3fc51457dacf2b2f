"""The auxiliary loss of a mixture of experts: its routers are trained to give every expert about as many tokens.

transformers computes it, as ``aux_loss``, where the configuration says ``output_router_logits``, and adds it to the
loss by a coefficient. It is a statistic of all tokens of a micro-batch, and so no sum over samples: accumulated, each
micro-batch is balanced for itself. It is therefore a loss term of its own, which the check for coupled samples finds.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

from torch import Tensor, nn

from tuner.errors import FieldProblem, SpecError, WorkloadError
from tuner.workloads.config_safety import configs_within

TransformersConfig: TypeAlias = Any
"""A ``transformers.PreTrainedConfig``; transformers ships no usable types."""

ROUTER_TERM = "router_aux_loss"
"""Name of the loss term."""
_WANTED = ("output_router_logits", "add_router_probs")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names of the factor in configurations of transformers: Mixtral's and most others, JetMoE's, DBRX's ``ffn_config``."""
_COMPUTES = "load_balancing_loss_func"
"""Function that every model with such a loss calls in its forward pass, as of transformers 5.23."""


def wants_router_loss(config: TransformersConfig) -> bool:
    """Return whether a configuration asks for the routers' logits, and with them for their loss."""
    return _asked(config) is not None


def _asked(config: TransformersConfig) -> str | None:
    """The field that asks for them, with its path."""
    found = (f"{path}.{name}" for path, one in configs_within(config) for name in _WANTED if getattr(one, name, False))
    return next(found, None)


def require_router_fields(fields: dict[str, Any], config: TransformersConfig) -> None:
    """Refuse a coefficient that would have no effect.

    Args:
        fields: what the spec gives.
        config: what was built from them.

    Raises:
        SpecError: when the coefficient is not the usual one, and nothing says whether there shall be a router loss.
    """
    usual = type(config)()
    for name in _COEFFICIENTS:
        given = fields.get(name)
        if given and given != getattr(usual, name, None) and not any(wanted in fields for wanted in _WANTED):
            message = f"has no effect unless `{_WANTED[0]}` is true: set that, or to false to train without it"
            raise SpecError([FieldProblem(f"model.config.{name}", message, str(given))])


def router_coefficient(config: TransformersConfig) -> float:
    """Factor of the routers' loss in the model's.

    Raises:
        SpecError: when the configuration has none.
    """
    for _, one in configs_within(config):
        for name in _COEFFICIENTS:
            if name in vars(one):
                return float(vars(one)[name])
    raise untrained(config, f"{type(config).__name__} has no factor for it")


def require_router_loss(model: nn.Module) -> None:
    """Refuse a model whose configuration asks for a router loss that transformers does not compute for this task.

    Raises:
        SpecError: naming the model's class.
    """
    forward = inspect.unwrap(type(model).forward)
    if _COMPUTES not in forward.__code__.co_names or "labels" not in inspect.signature(forward).parameters:
        raise untrained(model.config, f"{type(model).__name__} computes none")


def router_loss(output: Any) -> Tensor:  # noqa: ANN401 - a transformers.utils.ModelOutput
    """The routers' loss of a forward pass.

    Raises:
        WorkloadError: when the model has computed none.
    """
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"the config asks for `{_WANTED[0]}`, but this model returned no router loss (`aux_loss`): set it to false"
        )
    return loss


def untrained(config: TransformersConfig, reason: str) -> SpecError:
    """The error for a router loss that is asked for and would be left out."""
    message = f"asks for a router loss, which would not be trained: {reason}. Set it to false to train without"
    return SpecError([FieldProblem(f"model.{_asked(config) or 'config'}", message, "True")])
