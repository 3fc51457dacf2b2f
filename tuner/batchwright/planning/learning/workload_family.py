"""Families of workloads: the parts of a spec that decide which kernels run, without its sizes. Pure, no torch."""

from batchwright.planning.parameters import PARAMETERS
from batchwright.schemas.workload import PythonModel, ReferenceModel, TransformersModel, WorkloadSpec

_SEPARATOR = "|"
_LONGEST_ATTENTION = 60
"""Characters of the free field ``attn_implementation`` that count, so that a family stays below 1000 characters."""


def family_of(spec: WorkloadSpec) -> str:
    """The family of a workload as text: the model first, then the other parts in a fixed order."""
    optimizer = spec.optimizer
    options = {
        "checkpointing": spec.activation_checkpointing,
        "clipping": spec.gradient_clipping is not None,
        "ema": spec.ema_decay is not None,
        "compile": spec.compile,
        "label smoothing": spec.label_smoothing > 0.0,
        "packing": spec.batch.packing is not None,
        "preference": spec.preference is not None,
    }
    flags = sorted(name for name, value in optimizer.arguments.items() if value is True)
    parts = (
        _model(spec.model),
        " ".join([optimizer.name, optimizer.implementation, *["momentum"] * (optimizer.momentum > 0), *flags]),
        spec.precision,
        " ".join(name for name, chosen in options.items() if chosen) or "no options",
        f"{spec.gradient_gathering} gathering",
        spec.parallelism.strategy if spec.parallelism.world_size > 1 else "one rank",
    )
    return _SEPARATOR.join(part.replace(_SEPARATOR, "/") for part in parts)


def _model(model: TransformersModel | ReferenceModel | PythonModel) -> str:
    if isinstance(model, TransformersModel):
        attention = str(model.config.get("attn_implementation", "default"))[:_LONGEST_ATTENTION]
        return f"transformers {model.task} {model.model_type} {attention} attention"
    if isinstance(model, ReferenceModel):
        return f"reference {model.architecture.name}"
    return f"python {model.target}"


def family_weight(one: str, other: str) -> float:
    """The weight of a residual of one family for another, from 0 to 1: less for each part that differs."""
    (model, *parts), (other_model, *other_parts) = one.split(_SEPARATOR), other.split(_SEPARATOR)
    differing = sum(here != there for here, there in zip(parts, other_parts, strict=True))
    weight = PARAMETERS.other_option_weight**differing
    return weight if model == other_model else weight * PARAMETERS.other_model_weight
