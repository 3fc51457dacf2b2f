"""torchtitan: settings of a configuration function, in samples (0.3.0) or in tokens (its main branch since)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tuner.errors import ExportError
from tuner.exports import advice
from tuner.exports.base import Order, Target, Written
from tuner.exports.rendering import origin, python_file
from tuner.schemas.recommendation import Advice

_IN_SAMPLES, _IN_TOKENS = "0.3.0", "main-2026-08-20"
_DTYPES = {
    "fp32": ("float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
}
"""For a precision, the type of the weights and the one of the computation."""


def _batch(order: Order) -> dict[str, int]:
    length, figures = order.recommendation.request.spec.batch.sequence_length, order.figures
    if order.version == _IN_SAMPLES:
        lengths = {} if length is None else {"seq_len": length}
        sizes = {"local_batch_size": figures.micro_batch_size, "global_batch_size": figures.effective_batch_size}
        return {**sizes, **lengths}
    if length is None:
        raise ExportError(
            "not-expressible",
            f"torchtitan {_IN_TOKENS} counts tokens, and the spec of recommendation {order.recommendation.id} has no "
            "`batch.sequence_length`: tune with one, or export for torchtitan 0.3.0, which counts samples.",
        )
    return {
        "num_tokens_per_microbatch_per_dp_rank": figures.micro_batch_size * length,
        "num_tokens_per_train_step": figures.effective_batch_size * length,
        "max_context_length": length,
    }


def _training(order: Order) -> dict[str, int | float | str]:
    """The settings of `training`."""
    spec = order.recommendation.request.spec
    settings: dict[str, int | float | str] = {**_batch(order)}
    if order.version == _IN_SAMPLES:
        settings["max_norm"] = float("inf") if spec.gradient_clipping is None else spec.gradient_clipping
    if spec.precision in _DTYPES:
        settings["dtype"], settings["mixed_precision_param"] = _DTYPES[spec.precision]
    return settings


def _parallelism(order: Order) -> dict[str, int | float | str]:
    """The settings of `parallelism`: copies (DDP) or shards (FSDP)."""
    ranks, strategy = order.figures.world_size, order.recommendation.request.spec.parallelism.strategy
    copies, shards = (1, ranks) if strategy == "fsdp" else (ranks, 1)
    return {"data_parallel_replicate_degree": copies, "data_parallel_shard_degree": shards}


def _arguments(order: Order) -> tuple[str, ...]:
    sections = {"training": _training(order), "parallelism": _parallelism(order)}
    return tuple(f"--{part}.{name}={value}" for part, settings in sections.items() for name, value in settings.items())


def _literal(settings: Mapping[str, int | float | str]) -> str:
    """A dictionary in Python's words."""
    lines = "".join(f"    {json.dumps(name)}: {_value(value)},\n" for name, value in settings.items())
    return f"{{\n{lines}}}"


def _value(value: float | str) -> str:
    return 'float("inf")' if value == float("inf") else json.dumps(value)


def _write(order: Order) -> Written:
    content = f'''{origin(order)}"""The batch figures for torchtitan {order.version}, to be set in a `Trainer.Config`.

In a module of your own, which `--module` and `--config` name:

    def my_run():
        return with_batch(llama3_8b())
"""

TRAINING = {_literal(_training(order))}
PARALLELISM = {_literal(_parallelism(order))}


def with_batch(config):
    """The same configuration with the batch figures; a name that this torchtitan does not know is an error."""
    for name, value in TRAINING.items():
        setattr(config.training, name, value)
    for name, value in PARALLELISM.items():
        setattr(config.parallelism, name, value)
    return config
'''
    return Written((python_file("batchwright_torchtitan.py", content),), warnings=_warnings(order))


def _warnings(order: Order) -> tuple[Advice, ...]:
    spec = order.recommendation.request.spec
    found = [
        *advice.measured_elsewhere(order, "torchtitan"),
        advice.data_parallel_ranks(order, "tensor x pipeline x context parallel degree"),
        Advice(
            code="packing-changes-samples",
            message="torchtitan cuts its text into full sequences: a sample of these figures is such a sequence, not a "
            "document.",
        ),
        Advice(
            code="recomputes-by-default",
            message="Activations are recomputed selectively unless `activation_checkpoint` says otherwise; the probes "
            f"ran {'with' if spec.activation_checkpointing else 'without'} recomputation.",
        ),
    ]
    if order.version == _IN_TOKENS:
        found.append(_clipping_moved(spec.gradient_clipping))
    if spec.precision not in _DTYPES:
        found.append(advice.precision_differs(order, is_here="torchtitan has no fp16."))
    return tuple(found)


def _clipping_moved(limit: float | None) -> Advice:
    if limit is None:
        remedy = 'Set it to `float("inf")`; it belongs to `training` or to `optimizer`, by the day of the checkout.'
        return advice.clips_by_itself("max_norm", remedy=remedy)
    message = (
        f"The spec clips gradients at {limit}: set `max_norm` to it. It belongs to `training` or to `optimizer`, by "
        "the day of the checkout, and is 1.0 by default."
    )
    return Advice(code="clipping-not-written", message=message)


TARGET = Target(
    name="torchtitan",
    title="torchtitan",
    kind="framework",
    versions=(_IN_SAMPLES, _IN_TOKENS),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    checked="set on the configuration classes of torchtitan 0.3.0; compared with the recorded ones of its main branch",
)
