"""torchtitan: settings of a configuration function, in samples (0.3.0) or in tokens (its main branch since)."""

import json
from collections.abc import Mapping

from batchwright.errors import ExportError
from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import origin, python_file

_IN_SAMPLES, _IN_TOKENS = "0.3.0", "main-2026-08-20"
_DTYPES = {
    "fp32": ("float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
}
"""Types of the weights and of the computation, by precision."""


def _batch(context: ExportContext) -> dict[str, int]:
    length, plan = context.spec.batch.sequence_length, context.plan
    if context.version == _IN_SAMPLES:
        lengths = {} if length is None else {"seq_len": length}
        sizes = {"local_batch_size": plan.micro_batch_size, "global_batch_size": plan.effective_batch_size}
        return {**sizes, **lengths}
    if length is None:
        raise ExportError(
            "not-expressible",
            f"torchtitan {_IN_TOKENS} counts tokens, and the spec of recommendation {context.recommendation.id} has no "
            "`batch.sequence_length`: tune with one, or export for torchtitan 0.3.0, which counts samples.",
        )
    return {
        "num_tokens_per_microbatch_per_dp_rank": plan.micro_batch_size * length,
        "num_tokens_per_train_step": plan.effective_batch_size * length,
        "max_context_length": length,
    }


def _training(context: ExportContext) -> dict[str, int | float | str]:
    """The settings of `training`."""
    spec = context.spec
    settings: dict[str, int | float | str] = {**_batch(context)}
    if context.version == _IN_SAMPLES:
        settings["max_norm"] = float("inf") if spec.gradient_clipping is None else spec.gradient_clipping
    if spec.precision in _DTYPES:
        settings["dtype"], settings["mixed_precision_param"] = _DTYPES[spec.precision]
    return settings


def _parallelism(context: ExportContext) -> dict[str, int | float | str]:
    """The settings of `parallelism`: copies (DDP) or shards (FSDP)."""
    ranks, strategy = context.plan.world_size, context.spec.parallelism.strategy
    copies, shards = (1, ranks) if strategy == "fsdp" else (ranks, 1)
    return {"data_parallel_replicate_degree": copies, "data_parallel_shard_degree": shards}


def _arguments(context: ExportContext) -> tuple[str, ...]:
    sections = {"training": _training(context), "parallelism": _parallelism(context)}
    return tuple(f"--{part}.{name}={value}" for part, settings in sections.items() for name, value in settings.items())


def _literal(settings: Mapping[str, int | float | str]) -> str:
    """Format a dictionary as Python code."""
    values = {name: 'float("inf")' if value == float("inf") else json.dumps(value) for name, value in settings.items()}
    lines = "".join(f"    {json.dumps(name)}: {value},\n" for name, value in values.items())
    return f"{{\n{lines}}}"


def _write(context: ExportContext) -> TargetOutput:
    content = f'''{origin(context)}"""The batch sizes for torchtitan {context.version}, to be set in a `Trainer.Config`.

In a module of your own, which `--module` and `--config` name:

    def my_run():
        return with_batch(llama3_8b())
"""

TRAINING = {_literal(_training(context))}
PARALLELISM = {_literal(_parallelism(context))}


def with_batch(config):
    """Set the batch sizes of a configuration; a name that this torchtitan does not know is an error."""
    for name, value in TRAINING.items():
        setattr(config.training, name, value)
    for name, value in PARALLELISM.items():
        setattr(config.parallelism, name, value)
    return config
'''
    return TargetOutput((python_file("batchwright_torchtitan.py", content),), warnings=_warnings(context))


def _warnings(context: ExportContext) -> Warnings:
    spec, limit = context.spec, context.spec.gradient_clipping
    found = advice.measured_elsewhere(context, "torchtitan")
    found |= advice.data_parallel_ranks(context, "tensor x pipeline x context parallel degree")
    found["packing-changes-samples"] = (
        "torchtitan cuts its text into full sequences: a sample of this plan is one such sequence, not a document."
    )
    found["recomputes-by-default"] = (
        "Activations are recomputed selectively unless `activation_checkpoint` is set; the probes ran "
        f"{'with' if spec.activation_checkpointing else 'without'} recomputation."
    )
    if spec.batch.packing is not None:
        found |= advice.packing(context, "attention that is causal within each document")
    if context.version == _IN_TOKENS and limit is None:
        found["clips-by-default"] = (
            "The spec does not clip gradients, but without `max_norm` they are clipped at a norm of 1.0. Set "
            'it to `float("inf")`; depending on the checkout, the field is in `training` or `optimizer`.'
        )
    elif context.version == _IN_TOKENS:
        found["clipping-not-written"] = (
            f"The spec clips gradients at {limit}: set `max_norm` to it. Depending on the checkout, the field "
            "is in `training` or `optimizer`; its default is 1.0."
        )
    if spec.precision not in _DTYPES:
        found |= advice.precision_differs(context, "torchtitan has no fp16.")
    return found


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
