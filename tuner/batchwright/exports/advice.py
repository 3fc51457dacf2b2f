"""Warnings that several targets share, each with the remedy, and the sentence on how to verify a run."""

from __future__ import annotations

from batchwright.exports.base import ExportContext
from batchwright.exports.spec_advice import (
    adapter_in_code,
    held_out_samples,
    moving_average,
    optimizer_in_8_bits,
    preference_in_code,
    smoothed_labels,
    spec_of,
)
from batchwright.schemas.recommendation import Advice

OWN_OPTIMIZER = Advice(
    code="own-optimizer",
    message="The probes ran with an optimizer of your own. Exports name that of the spec, which may take more memory: "
    "replace it by yours.",
)
"""Warning of a recommendation, which its exports repeat."""


def how_to_verify(context: ExportContext) -> str:
    """Say how a run that trains with the export is verified, in one sentence."""
    plan, recommended = context.plan, context.recommendation.plan
    if len({size for rank in plan.micro_batch_sizes for size in rank}) > 1:
        return (
            "The micro-batches are not all of one size: `batchwright verify` compares one repeated size, which exports "
            "to frameworks such as hugging-face have."
        )
    is_recommended = recommended is not None and plan.micro_batch_sizes == recommended.micro_batch_sizes
    named = "" if is_recommended else f" --format {context.format}"
    return f"Verify the run (COMMAND starts it): batchwright verify recommendation.json{named} -- COMMAND"


def measured_elsewhere(
    context: ExportContext,
    title: str,
    *,
    writes_adapter: bool = False,
    writes_optimizer: bool = False,
    writes_preference: bool = False,
) -> tuple[Advice, ...]:
    """Warn that the probes ran Batchwright's own loop, and list settings of the spec that are not written.

    Args:
        context: what is exported.
        title: the framework.
        writes_adapter: whether the export makes the adapter of the spec.
        writes_optimizer: whether the export names an optimizer with a state in 8 bits.
        writes_preference: whether the export makes the loss of the spec's preference pairs.
    """
    message = (
        f"A micro-batch of {context.plan.micro_batch_size} was proven with the model of the spec in Batchwright's own "
        f"loop. {title} builds model, optimizer and sharding by itself, which takes other memory: watch the peak of "
        "its first updates."
    )
    measured = Advice(code="memory-measured-elsewhere", message=message)
    in_code = (
        *moving_average(context),
        *smoothed_labels(context),
        *(() if writes_adapter else adapter_in_code(context)),
        *(() if writes_optimizer else optimizer_in_8_bits(context)),
        *(() if writes_preference else preference_in_code(context)),
        *held_out_samples(context),
    )
    return (measured, *_compiling(context, title), *in_code)


def _compiling(context: ExportContext, title: str) -> tuple[Advice, ...]:
    if not spec_of(context).compile:
        return ()
    message = (
        f"Compiling is not written: turn it on in the configuration of {title}. It changes memory, and was measured."
    )
    return (Advice(code="compile-not-written", message=message),)


def data_parallel_ranks(context: ExportContext, sizes: str) -> Advice:
    """Warn that the target derives its data-parallel ranks by dividing its processes by ``sizes``."""
    ranks = context.plan.world_size
    message = (
        f"The figures are for {ranks} data-parallel rank(s), which are what is left of the processes: with model "
        f"parallelism start {ranks} x {sizes} of them."
    )
    return Advice(code="data-parallel-ranks", message=message)


def packing(context: ExportContext, switch: str, *, is_written: bool = False) -> tuple[Advice, ...]:
    """Warn that the target can pack several samples into one sequence, in another way than the spec.

    Args:
        context: what is exported.
        switch: the setting of the target that turns packing on.
        is_written: whether the export turns it on for a spec that packs whole records.
    """
    batch = spec_of(context).batch
    if batch.packing == "bfd" and is_written:
        return ()
    if batch.packing is not None:
        message = (
            f"The spec packs records into sequences (`{batch.packing}`), which is not written: turn {switch} on, with "
            f"{batch.sequence_length} tokens per sequence, and see to it that records of a sequence do not attend to "
            "each other. The effective batch counts sequences."
        )
        return (Advice(code="packing-not-written", message=message),)
    message = (
        f"With {switch} several samples share a sequence, and the effective batch counts sequences instead of samples. "
        "Leave it off, or tune for an effective batch of packed sequences."
    )
    return (Advice(code="packing-changes-samples", message=message),)


def without_dropout(context: ExportContext, title: str) -> tuple[Advice, ...]:
    """Warn that the target's trainer of preference pairs, a subclass of TRL's, sets dropout to zero."""
    if spec_of(context).preference is None:
        return ()
    message = (
        f"For preference pairs {title} sets the dropout of the model to zero, as TRL does. That of the spec was "
        "measured: set it to zero in `model.config` to train alike."
    )
    return (Advice(code="dropout-off", message=message),)


def clips_by_itself(key: str, *, remedy: str) -> Advice:
    """Warn that the target clips gradients although the spec does not."""
    message = f"The spec does not clip gradients, but without `{key}` they are clipped at a norm of 1.0. {remedy}"
    return Advice(code="clips-by-default", message=message)


def precision_differs(context: ExportContext, *, is_here: str) -> Advice:
    """Warn that the target has no setting for the precision of the spec."""
    message = (
        f"The spec's precision `{context.recommendation.request.workload.precision}` is not written: {is_here} Memory "
        "and gradients differ from what was probed; set the precision yourself, and watch the peak of the first "
        "updates."
    )
    return Advice(code="precision-not-written", message=message)
