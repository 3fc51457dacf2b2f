"""Warnings that several targets share, each with the remedy, and the sentence on how to verify a run."""

from collections.abc import Collection

from batchwright.exports.base import ExportContext, Warnings
from batchwright.exports.spec_advice import Part, left_out
from batchwright.schemas.recommendation import Advice
from batchwright.units import counted

OWN_OPTIMIZER = Advice(
    code="own-optimizer",
    message="The probes ran with your own optimizer. Exports name the spec's optimizer, which may take more memory: "
    "replace it with yours.",
)
"""Warning of a recommendation, which its exports repeat."""

_OF_TRAINERS: tuple[Part, ...] = (
    "moving-average",
    "label-smoothing",
    "adapter-in-code",
    "optimizer-not-written",
    "preference-in-code",
    "evaluation",
)
"""Parts of the spec that a framework with its own loop may not write."""


def how_to_verify(context: ExportContext) -> str:
    """Say how a run that trains with the export is verified, in one sentence."""
    plan, recommended = context.plan, context.recommendation.plan
    if len({size for rank in plan.micro_batch_sizes for size in rank}) > 1:
        return (
            "`batchwright verify` cannot check this export, because its micro-batches differ in size; "
            "it can check the Hugging Face export."
        )
    is_recommended = recommended is not None and plan.micro_batch_sizes == recommended.micro_batch_sizes
    named = "" if is_recommended else f" --format {context.format}"
    return f"Verify the run (COMMAND starts it): batchwright verify recommendation.json{named} -- COMMAND"


def measured_elsewhere(context: ExportContext, title: str, written: Collection[Part] = ()) -> Warnings:
    """Warn that the probes ran Batchwright's own loop, and of the parts of the spec that are not ``written``."""
    found: Warnings = {}
    found["memory-measured-elsewhere"] = (
        f"A micro-batch of {context.plan.micro_batch_size} was proven with the model of the spec in "
        f"Batchwright's own loop. {title} builds the model, optimizer and sharding itself, so its memory may "
        "differ: watch the peak of the first updates."
    )
    if context.spec.compile:
        found["compile-not-written"] = (
            "This export does not turn compiling on. The probes ran compiled, which changes memory: turn it "
            f"on in the configuration of {title}."
        )
    return found | left_out(context, *(part for part in _OF_TRAINERS if part not in written))


def data_parallel_ranks(context: ExportContext, sizes: str) -> Warnings:
    """Warn that the target derives its data-parallel ranks by dividing its processes by ``sizes``."""
    found: Warnings = {}
    ranks = context.plan.world_size
    found["data-parallel-ranks"] = (
        f"The plan is for {counted(ranks, 'data-parallel rank')}: with model parallelism, start {ranks} x "
        f"{sizes} processes."
    )
    return found


def packing(context: ExportContext, switch: str, *, is_written: bool = False) -> Warnings:
    """Warn that the target can pack several samples into one sequence, in another way than the spec.

    Args:
        context: what is exported.
        switch: the setting of the target that turns packing on.
        is_written: whether the export turns it on for a spec that packs whole records.
    """
    found: Warnings = {}
    batch = context.spec.batch
    if batch.packing is None:
        found["packing-changes-samples"] = (
            f"With {switch} several samples share a sequence, and the effective batch counts sequences instead of "
            "samples. Leave it off, or tune for an effective batch of packed sequences."
        )
    elif batch.packing != "bfd" or not is_written:
        found["packing-not-written"] = (
            f"The spec packs records into sequences (`{batch.packing}`), which this export does not set: turn "
            f"{switch} on, with {batch.sequence_length} tokens per sequence, and make sure that records in a "
            "sequence do not attend to each other. The effective batch counts sequences."
        )
    return found


def without_dropout(title: str) -> Warnings:
    """Warn that the target's trainer of preference pairs, a subclass of TRL's, sets dropout to zero."""
    found: Warnings = {}
    found["dropout-off"] = (
        f"For preference pairs {title} sets the model's dropout to zero, like TRL. The probes used the spec's "
        "dropout: set it to zero in `model.config` to match."
    )
    return found


def precision_differs(context: ExportContext, is_here: str) -> Warnings:
    """Warn that the target has no setting for the precision of the spec."""
    found: Warnings = {}
    found["precision-not-written"] = (
        f"This export does not set the spec's precision `{context.spec.precision}`: {is_here} Set it yourself "
        "and watch the peak of the first updates: with another precision, memory and gradients differ from "
        "the probes."
    )
    return found
