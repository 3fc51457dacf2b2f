"""The recommendation that the evidence of a finished search supports. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from tuner.planning.accumulation import balanced_plan, share_per_rank, uniform_plan
from tuner.planning.coupled_loss import is_undivided
from tuner.planning.objectives import alternatives, choice_in_words, fastest
from tuner.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from tuner.planning.what_if import WhatIfAnswer, changes_in_words
from tuner.schemas.recommendation import (
    Advice,
    Alternative,
    CouplingCheck,
    Evidence,
    Headroom,
    Proof,
    Recommendation,
    Timings,
    WarmStart,
    WhatIf,
)
from tuner.schemas.requests import TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from tuner.units import format_bytes

_SHARED_DEVICE_BYTES = 64 * 1024**2
"""Driver and display take a little of an idle card; more than this is another process."""


@dataclass(frozen=True)
class Answered:
    """A finished search, with its request, its evidence and its conditions."""

    request: TuningRequest
    device: DeviceInfo
    proof: Proof
    probes: tuple[ProbeResult, ...]
    memory_limit_bytes: int
    probe_limit_bytes: int
    fingerprint: str
    environment: dict[str, str]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    expected: ExpectedPeaks | None = None
    warm_start: WarmStart | None = None
    what_if: WhatIfAnswer = field(default_factory=WhatIfAnswer)
    coupling: CouplingCheck | None = None
    parameters: SearchParameters = DEFAULT_PARAMETERS

    @property
    def share(self) -> int:
        """Samples of a rank in an update; of those with the most."""
        return share_per_rank(self.request.effective_batch_size, self.request.spec.parallelism.world_size)[0]

    @property
    def size(self) -> int:
        """The micro-batch size to recommend: the proven one, or that of the fastest plan; 0 when none fits."""
        quickest = fastest(self.share, self.probes, self.parameters) if self.request.objective == "fastest" else None
        return quickest.micro_batch_size if quickest else self.proof.fits

    @property
    def deciding_probe(self) -> ProbeResult | None:
        """The fit the recommendation rests on: of several at its size the one that held most memory."""
        probes = [probe for probe in self.probes if probe.micro_batch_size == self.size]
        fits = [probe for probe in probes if probe.outcome is Outcome.FIT]
        return max(fits, key=lambda probe: probe.held_bytes or 0, default=None)


def recommend(answered: Answered, *, identifier: str, created_at: datetime, total_seconds: float) -> Recommendation:
    """The recommendation, feasible or not.

    Raises:
        PlanError: when what fits is so small that its plan would list too many micro-batches.
    """
    request, size = answered.request, answered.size
    world_size = request.spec.parallelism.world_size
    plan = balanced_plan(request.effective_batch_size, world_size, size) if size else None
    uniform = uniform_plan(request.effective_batch_size, world_size, size) if size and request.uniform else None
    listed = _alternatives(answered)
    return Recommendation(
        plan=plan,
        largest_micro_batch_size=size or None,
        id=identifier,
        created_at=created_at,
        feasible=plan is not None,
        infeasible_reason=None if plan else infeasible_reason(answered),
        choice=_choice(answered, listed) if size else "",
        alternatives=listed,
        what_ifs=answered.what_if.what_ifs,
        uniform=uniform,
        evidence=Evidence(
            probes=answered.probes,
            proof=answered.proof,
            expected=answered.expected,
            warm_start=answered.warm_start,
            coupling=answered.coupling,
        ),
        headroom=_headroom(answered),
        device=answered.device,
        fingerprint=answered.fingerprint,
        environment=answered.environment,
        warnings=tuple(_warnings(answered)),
        versions=answered.versions,
        timings=_timings(answered.probes, total_seconds),
        request=request,
    )


def _choice(answered: Answered, listed: tuple[Alternative, ...]) -> str:
    request = answered.request
    bounded = request.max_micro_batch_size is not None and request.max_micro_batch_size < answered.share
    return choice_in_words(
        request.objective,
        answered.share,
        answered.size,
        answered.proof,
        listed,
        of_a_grid=request.granularity > 1 or bounded,
    )


def _alternatives(answered: Answered) -> tuple[Alternative, ...]:
    if not answered.size:
        return ()
    listed = alternatives(answered.share, answered.size, answered.proof.fits, answered.probes, answered.parameters)
    return (
        tuple(plan for plan in listed if plan.chosen) if is_undivided(answered.request, answered.coupling) else listed
    )


def _headroom(answered: Answered) -> Headroom | None:
    probe = answered.deciding_probe
    if probe is None:
        return None
    limit, peak = answered.memory_limit_bytes, probe.held_bytes or 0
    available = min(limit, answered.device.total_bytes - (probe.other_processes_bytes or 0))
    free = max(0, available - peak)
    return Headroom(limit_bytes=limit, peak_bytes=peak, free_bytes=free, free_fraction=free / limit)


def _timings(probes: tuple[ProbeResult, ...], total_seconds: float) -> Timings:
    return Timings(
        total_seconds=total_seconds,
        probe_seconds=sum(probe.seconds.total for probe in probes),
        probes=len(probes),
        out_of_memory_probes=sum(probe.outcome is Outcome.OOM for probe in probes),
    )


def infeasible_reason(answered: Answered) -> str:
    """Explain why not even the smallest micro-batch fits: the numbers, and the remedies."""
    stopped = [probe for probe in answered.probes if probe.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}]
    failed = next(probe for probe in stopped if probe.micro_batch_size == answered.proof.next_size)
    limit, probed = format_bytes(answered.memory_limit_bytes), format_bytes(answered.probe_limit_bytes)
    headline = (
        f"A micro-batch of {failed.micro_batch_size} does not fit into {limit} on {answered.device.id} "
        f"({probed} after the margin of {answered.request.memory_margin:.0%}): {failed.message}."
    )
    parts = [headline]
    if failed.model is not None:
        parts.append(
            f"The model has {failed.model.parameters:,} parameters in {format_bytes(failed.model.parameter_bytes)}, "
            f"before gradients ({format_bytes(_gradient_bytes(failed))}), optimizer state and activations."
        )
    parts.append("What can make it fit: " + "; ".join(_remedies(answered)) + ".")
    return " ".join(parts)


def _gradient_bytes(probe: ProbeResult) -> int:
    """Gradients have their parameters' type, so they take the parameters' bytes in proportion."""
    model = probe.model
    if model is None or not model.parameters:
        return 0
    return model.parameter_bytes * model.trainable_parameters // model.parameters


def _remedies(answered: Answered) -> list[str]:
    spec, granularity = answered.request.spec, answered.request.granularity
    remedies = []
    if granularity > 1:
        remedies.append(f"a granularity of 1 instead of {granularity}")
    remedies += _estimated_remedies(answered.what_if.what_ifs)
    if not spec.activation_checkpointing and "activation_checkpointing" not in answered.what_if.judged:
        remedies.append("activation_checkpointing: true")
    if spec.precision == "fp32" and "precision" not in answered.what_if.judged:
        remedies.append("precision: bf16-mixed")
    if spec.batch.sequence_length or spec.batch.image_size:
        remedies.append("a shorter sequence_length" if spec.batch.sequence_length else "a smaller image_size")
    if spec.optimizer.name != "sgd":
        remedies.append("an optimizer with less state (sgd)")
    return [*remedies, "a smaller model", "a larger memory limit or device"]


def _estimated_remedies(what_ifs: tuple[WhatIf, ...]) -> list[str]:
    """The remedies by what-ifs: those that fit, the largest first, or the one that comes nearest."""
    fitting = [it for it in what_ifs if it.largest_micro_batch_size]
    if fitting:
        return [
            f"{changes_in_words(it.changes)} (a micro-batch of {it.largest_micro_batch_size} is expected to fit, "
            "estimated)"
            for it in fitting
        ]
    nearest = min(what_ifs, key=lambda what_if: what_if.peak_bytes, default=None)
    if nearest is None:
        return []
    peak = format_bytes(nearest.peak_bytes)
    return [f"{changes_in_words(nearest.changes)} and more of what follows (alone it would take {peak}, estimated)"]


def _not_estimated(changes: str) -> Advice:
    what = f"What {changes} would change" if changes else "What changes of the spec would make fit"
    message = f"{what} could not be estimated: the workload cannot be traced, or not in time. A tuning can measure it."
    return Advice(code="what-if-not-estimated", message=message)


def _warnings(answered: Answered) -> list[Advice]:
    probe = answered.deciding_probe
    found = [Advice(code="inconsistent-outcomes", message=note) for note in answered.notes]
    if probe is not None:
        found += _warnings_of_probe(probe, answered.device)
    timed = [probe for probe in answered.probes if probe.measures_time]
    found += [_untimed(probe) for probe in timed if probe.outcome is not Outcome.FIT]
    if answered.proof.stopped_by == "invalid-size":
        message = f"Size {answered.proof.next_size} failed for another reason than memory; see its probe's message."
        found.append(Advice(code="stopped-by-kernel-limit", message=message))
    if answered.proof.stopped_by == "warm-start":
        message = (
            f"Only {answered.proof.fits} was run, to confirm the recommendation of the warm start; that "
            f"{answered.proof.next_size} fails was measured then. Tune without a warm start to measure it now."
        )
        found.append(Advice(code="rests-on-warm-start", message=message))
    if not answered.proof.is_conclusive:
        found.append(Advice(code="larger-sizes-not-known", message=answered.proof.statement))
    found += [_not_estimated(changes) for changes in answered.what_if.unanswered]
    found += _warnings_of_coupling(answered)
    found += _warnings_of_parallelism(answered.request)
    return found


def _warnings_of_coupling(answered: Answered) -> list[Advice]:
    check = answered.coupling
    if check is None or check.verdict == "separate":
        return []
    if check.verdict == "not-compared":
        message = (
            f"Whether the loss couples the samples of a batch could not be checked: {check.message} If it does, "
            "accumulated updates differ from full-batch ones."
        )
        return [Advice(code="coupling-not-checked", message=message)]
    if answered.request.spec.parallelism.world_size == 1 and answered.size == answered.share:
        message = f"{check.message} This plan is exact, as it has the whole batch in one micro-batch; no other one is."
        return [Advice(code="coupled-loss", message=message)]
    return [Advice(code="coupled-loss", message=check.message)]


def _untimed(probe: ProbeResult) -> Advice:
    message = (
        f"The plan with micro-batches of {probe.micro_batch_size} could not be timed and is not chosen "
        f"({probe.outcome}: {probe.message})."
    )
    return Advice(code="plan-not-timed", message=message)


def _warnings_of_probe(probe: ProbeResult, device: DeviceInfo) -> list[Advice]:
    found = []
    if probe.model is not None and probe.model.batch_coupled_modules:
        names = probe.model.batch_coupled_modules
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004
        message = (
            f"{shown}: their statistics are those of a micro-batch, so accumulated updates differ from full-batch ones "
            "whatever the loss scaling. Use GroupNorm or LayerNorm, or freeze the statistics, if that matters."
        )
        found.append(Advice(code="batch-coupled-modules", message=message))
    if (probe.other_processes_bytes or 0) > _SHARED_DEVICE_BYTES:
        message = (
            f"Other processes held {format_bytes(probe.other_processes_bytes or 0)} of {device.id} while it was "
            "probed: the answer holds while they hold no more."
        )
        found.append(Advice(code="shared-device", message=message))
    if probe.allocator_retries:
        message = (
            f"At this size the allocator gave back its cache and tried again {probe.allocator_retries} times in one "
            "update: it fits, but slowly. The objective `fastest` measures what a smaller micro-batch gains."
        )
        found.append(Advice(code="thrashing-fit", message=message))
    return found


def _warnings_of_parallelism(request: TuningRequest) -> list[Advice]:
    parallelism = request.spec.parallelism
    if parallelism.world_size == 1:
        return []
    found = []
    if parallelism.strategy == "fsdp":
        message = (
            "The probe held the whole model on one device, as no other rank was there to share it with: the answer is "
            "on the safe side, larger micro-batches may fit."
        )
        found.append(Advice(code="fsdp-probed-unsharded", message=message))
    message = (
        "Gradient buckets were held as in a distributed run, but the buffers of the communication library are not in "
        "the measurement (NCCL: 0.5 to 1.6 GB per communicator, outside torch's allocator)."
    )
    found.append(Advice(code="communication-buffers-not-probed", message=message))
    return found
