"""Why nothing fits, and what can make it fit. Pure, no torch."""

from batchwright.planning.comparison.what_if import format_changes
from batchwright.planning.finished_tuning import FinishedTuning
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.recommendation import WhatIf
from batchwright.schemas.results import Outcome, Phase, ProbeResult
from batchwright.units import format_bytes, format_share


def infeasible_reason(finished: FinishedTuning) -> str:
    """Explain why not even the smallest micro-batch fits: the numbers, and the remedies."""
    stopped = [probe for probe in finished.probes if probe.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}]
    failed = next(probe for probe in stopped if probe.micro_batch_size == finished.proof.next_size)
    conditions = finished.conditions
    limit, probed = format_bytes(conditions.memory_limit_bytes), format_bytes(conditions.probe_limit_bytes)
    headline = (
        f"A micro-batch of {failed.micro_batch_size} does not fit into {limit} on {conditions.device.id} "
        f"({probed} after the margin of {format_share(finished.request.memory_margin)}): {failed.message}."
    )
    parts = [headline]
    if failed.model is not None:
        parts.append(
            f"The model has {failed.model.parameters:,} parameters in {format_bytes(failed.model.parameter_bytes)}, "
            f"before gradients ({format_bytes(failed.model.gradient_bytes)}), optimizer state and activations."
        )
    parts.append("What can make it fit: " + "; ".join(_remedies(finished, failed)) + ".")
    return " ".join(parts)


def _remedies(finished: FinishedTuning, failed: ProbeResult) -> list[str]:
    granularity = finished.request.granularity
    remedies = []
    if finished.request.command is not None and failed.phase in {Phase.START, Phase.BUILD}:
        loads = "a smaller model, or less that the program imports after torch and loads"
        return ["a larger memory limit or device", loads]
    if granularity > 1:
        remedies.append(f"a granularity of 1 instead of {granularity}")
    if finished.request.command is not None:
        in_program = "shorter samples, activation checkpointing or a smaller model in the program"
        return [*remedies, in_program, "a larger memory limit or device"]
    spec = finished.request.workload
    remedies += _estimated_remedies(finished.what_if.what_ifs)
    if not spec.activation_checkpointing and "activation_checkpointing" not in finished.what_if.estimated_fields:
        remedies.append("activation_checkpointing: true")
    if spec.precision == "fp32" and "precision" not in finished.what_if.estimated_fields:
        remedies.append("precision: bf16-mixed")
    remedies += _smaller_samples(spec.batch)
    if spec.optimizer.name != "sgd":
        remedies.append("an optimizer with less state (sgd)")
    return [*remedies, "a smaller model", "a larger memory limit or device"]


def _smaller_samples(batch: BatchSpec) -> list[str]:
    if batch.audio_length:
        return ["a shorter audio_length"]
    if batch.sequence_length:
        return ["a shorter sequence_length"]
    return ["a smaller image_size"] if batch.image_size else []


def _estimated_remedies(what_ifs: tuple[WhatIf, ...]) -> list[str]:
    """Remedies from what-ifs: those that fit, the largest first, or else the one with the smallest peak."""
    fitting = [what_if for what_if in what_ifs if what_if.largest_micro_batch_size]
    if fitting:
        return [
            f"{format_changes(what_if.changes)} (estimate: a micro-batch of {what_if.largest_micro_batch_size} fits)"
            for what_if in fitting
        ]
    nearest = min(what_ifs, key=lambda what_if: what_if.peak_bytes, default=None)
    if nearest is None:
        return []
    peak = format_bytes(nearest.peak_bytes)
    return [f"{format_changes(nearest.changes)}, with some of the following (alone it would take an estimated {peak})"]
