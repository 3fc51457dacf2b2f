"""The recommendation that the evidence of a finished search supports. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from batchwright.planning.accumulation import balanced_plan, repeated_plan, share_per_rank, steps_of, uniform_plan
from batchwright.planning.comparison.gain import with_gain
from batchwright.planning.comparison.what_if import WhatIfResult, format_changes
from batchwright.planning.objectives import alternatives, describe_choice
from batchwright.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from batchwright.planning.proofs.coupled_loss import is_undivided
from batchwright.planning.proofs.plan_proof import PlanProof, format_window
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.field_errors import listed
from batchwright.schemas.recommendation import (
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
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult, WrittenFiles
from batchwright.units import format_bytes

_SHARED_DEVICE_BYTES = 64 * 1024**2
"""Bytes that the driver and a display take of an idle card; more than this is another process."""
_WORTH_ANOTHER_BATCH = 2
"""Times by which the micro-batches of another effective batch must be larger for it to be named."""
_COMMAND_NOT_COMPARED = CouplingCheck(
    verdict="not-compared",
    message="The loss of a command cannot be called with parts of a batch. Batch norms are found while it trains.",
)


@dataclass(frozen=True)
class FinishedTuning:
    """A finished tuning: the request, the evidence, and the conditions of the search."""

    request: TuningRequest
    device: DeviceInfo
    proof: Proof
    plan_proof: PlanProof | None
    probes: tuple[ProbeResult, ...]
    memory_limit_bytes: int
    probe_limit_bytes: int
    fingerprint: str
    environment: dict[str, str]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    expected: ExpectedPeaks | None = None
    late_estimate: str | None = None
    """A sentence about an estimate that was missing when the search began; None where none was."""
    warm_start: WarmStart | None = None
    what_if: WhatIfResult = field(default_factory=WhatIfResult)
    coupling: CouplingCheck | None = None
    accumulates: bool = True
    parameters: SearchParameters = DEFAULT_PARAMETERS

    @property
    def share(self) -> int:
        """Samples of the rank with the most in an update."""
        return share_per_rank(self.request.effective_batch_size, self.request.spec.parallelism.world_size)[0]

    @property
    def size(self) -> int:
        """The micro-batch size to recommend: the proven size, or the size of another plan; 0 when none fits."""
        return self.plan_proof.size if self.plan_proof else 0

    @property
    def deciding_probe(self) -> ProbeResult | None:
        """The fit that held the most memory, among those of the recommended size and of its plan."""
        plan_fit = self.plan_proof.fit if self.plan_proof else None
        fits = [probe for probe in self.probes if probe.outcome is Outcome.FIT]
        deciding = [probe for probe in fits if probe.micro_batch_size == self.size or probe is plan_fit]
        deciding = deciding or [probe for probe in fits if probe.micro_batch_size == self.proof.fits]
        return max(deciding, key=lambda probe: probe.held_bytes or 0, default=None)


def recommend(
    finished: FinishedTuning, *, identifier: str, created_at: datetime, total_seconds: float
) -> Recommendation:
    """Build the recommendation, feasible or not.

    Raises:
        PlanError: when the largest fit is so small that its plan would list too many micro-batches.
    """
    request, size = finished.request, finished.size
    world_size = request.spec.parallelism.world_size
    plan_of_size = balanced_plan if request.command is None else repeated_plan
    refusal = finished.plan_proof.refusal if finished.plan_proof is not None else ""
    plan = plan_of_size(request.effective_batch_size, world_size, size) if size and not refusal else None
    uniform = uniform_plan(request.effective_batch_size, world_size, size) if size and request.uniform else None
    listed = _alternatives(finished)
    statement = finished.proof.statement + _probes_in_words(request, finished.probes)
    proof = finished.proof.model_copy(update={"statement": statement})
    found = Recommendation(
        plan=plan,
        largest_micro_batch_size=_largest(finished) or None,
        id=identifier,
        created_at=created_at,
        feasible=plan is not None,
        infeasible_reason=None if plan else refusal or infeasible_reason(finished),
        choice=_choice(finished, listed) if size else "",
        alternatives=listed,
        what_ifs=finished.what_if.what_ifs,
        uniform=uniform,
        evidence=Evidence(
            probes=tuple(_with_verdict(probe, finished) for probe in finished.probes),
            proof=proof,
            simulated_ranks=simulated_ranks_of(finished.probes),
            plan_proof=finished.plan_proof.statement if finished.plan_proof else "",
            expected=finished.expected,
            warm_start=finished.warm_start,
            coupling=finished.coupling if request.command is None else _COMMAND_NOT_COMPARED,
        ),
        headroom=_headroom(finished),
        device=finished.device,
        fingerprint=finished.fingerprint,
        environment=finished.environment,
        warnings=tuple(_warnings(finished)),
        versions=finished.versions,
        timings=_timings(finished.probes, total_seconds),
        request=request,
    )
    return with_gain(found)


def _with_verdict(probe: ProbeResult, finished: FinishedTuning) -> ProbeResult:
    """The probe; that of a command's plan with the verdict that all probes give."""
    fit = finished.plan_proof.fit if finished.plan_proof is not None else None
    is_same = fit is not None and fit.model_copy(update={"counted": None}) == probe.model_copy(update={"counted": None})
    return fit if fit is not None and is_same else probe


def _largest(finished: FinishedTuning) -> int:
    """The size that fits: of a command the largest that was found, of which the plan may have a divisor."""
    if finished.request.command is None or finished.plan_proof is None or finished.plan_proof.failed:
        return finished.size
    return finished.size if finished.request.objective == "fastest" else finished.proof.fits


def _choice(finished: FinishedTuning, listed: tuple[Alternative, ...]) -> str:
    request = finished.request
    if finished.plan_proof is not None and finished.plan_proof.failed:
        run, share = finished.plan_proof.failed[0], finished.share
        return (
            f"The {steps_of(share, run.micro_batch_size)}-step plan ({format_window(run.micro_batch_sizes)}) "
            f"{'ran out of memory' if run.outcome is Outcome.OOM else 'is not valid'}, so the plan has "
            f"{steps_of(share, finished.size)} steps of {finished.size} at most."
        )
    bounded = request.max_micro_batch_size is not None and request.max_micro_batch_size < finished.share
    return describe_choice(
        request.objective,
        finished.share,
        finished.size,
        finished.proof,
        listed,
        of_a_grid=request.granularity > 1 or bounded or request.searches_divisors,
    )


def _alternatives(finished: FinishedTuning) -> tuple[Alternative, ...]:
    if not finished.size:
        return ()
    listed = alternatives(
        finished.share,
        finished.size,
        finished.proof.fits,
        finished.probes,
        finished.parameters,
        repeats=finished.request.command is not None,
    )
    command = finished.request.command
    makes_its_own = command is not None and not command.model.takes_accumulation
    undivided = not finished.accumulates or makes_its_own or is_undivided(finished.request, finished.coupling)
    return tuple(plan for plan in listed if plan.chosen) if undivided else listed


def _headroom(finished: FinishedTuning) -> Headroom | None:
    probe = finished.deciding_probe
    if probe is None:
        return None
    limit, peak = finished.memory_limit_bytes, probe.held_bytes or 0
    available = min(limit, finished.device.total_bytes - (probe.other_processes_bytes or 0))
    free = max(0, available - peak)
    return Headroom(
        limit_bytes=limit,
        peak_bytes=peak,
        allocated_bytes=probe.peak_allocated_bytes,
        reserved_bytes=probe.peak_reserved_bytes,
        context_bytes=probe.context_bytes,
        free_bytes=free,
        free_fraction=free / limit,
    )


def _timings(probes: tuple[ProbeResult, ...], total_seconds: float) -> Timings:
    return Timings(
        total_seconds=total_seconds,
        probe_seconds=sum(probe.seconds.total for probe in probes),
        probes=len(probes),
        out_of_memory_probes=sum(probe.outcome is Outcome.OOM for probe in probes),
    )


def infeasible_reason(finished: FinishedTuning) -> str:
    """Explain why not even the smallest micro-batch fits: the numbers, and the remedies."""
    stopped = [probe for probe in finished.probes if probe.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}]
    failed = next(probe for probe in stopped if probe.micro_batch_size == finished.proof.next_size)
    limit, probed = format_bytes(finished.memory_limit_bytes), format_bytes(finished.probe_limit_bytes)
    headline = (
        f"A micro-batch of {failed.micro_batch_size} does not fit into {limit} on {finished.device.id} "
        f"({probed} after the margin of {finished.request.memory_margin:.0%}): {failed.message}."
    )
    parts = [headline]
    if failed.model is not None:
        parts.append(
            f"The model has {failed.model.parameters:,} parameters in {format_bytes(failed.model.parameter_bytes)}, "
            f"before gradients ({format_bytes(failed.model.gradient_bytes)}), optimizer state and activations."
        )
    parts.append("What can make it fit: " + "; ".join(_remedies(finished)) + ".")
    return " ".join(parts)


def _remedies(finished: FinishedTuning) -> list[str]:
    granularity = finished.request.granularity
    remedies = []
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
            f"{format_changes(what_if.changes)} (a micro-batch of {what_if.largest_micro_batch_size} is expected to "
            "fit, estimated)"
            for what_if in fitting
        ]
    nearest = min(what_ifs, key=lambda what_if: what_if.peak_bytes, default=None)
    if nearest is None:
        return []
    peak = format_bytes(nearest.peak_bytes)
    return [f"{format_changes(nearest.changes)} and more of the following (alone it would take {peak}, estimated)"]


def _not_estimated(changes: str) -> Advice:
    subject = f"The effect of {changes}" if changes else "The effect of changes of the spec"
    message = f"{subject} could not be estimated: tracing failed or timed out. Tune the changed spec to measure it."
    return Advice(code="what-if-not-estimated", message=message)


def _warnings(finished: FinishedTuning) -> list[Advice]:
    probe = finished.deciding_probe
    found = [Advice(code="inconsistent-outcomes", message=note) for note in finished.notes]
    if finished.late_estimate is not None:
        message = f"{finished.late_estimate} This may cost probes, and changes nothing in the proof."
        found.append(Advice(code="search-without-estimate", message=message))
    if probe is not None:
        found += _warnings_of_probe(probe, finished.device)
    untimed = [each for each in finished.probes if each.measures_time and each.outcome is not Outcome.FIT]
    for each in untimed:
        size, reason = each.micro_batch_size, f"{each.outcome}: {each.message}"
        message = f"The plan with micro-batches of {size} could not be timed and is not chosen ({reason})."
        found.append(Advice(code="plan-not-timed", message=message))
    if finished.plan_proof is not None and finished.plan_proof.inconclusive is not None:
        found.append(Advice(code="plan-not-known-to-fit", message=finished.plan_proof.statement))
    if finished.proof.stopped_by == "invalid-size":
        message = f"Size {finished.proof.next_size} failed for another reason than memory; see its probe's message."
        found.append(Advice(code="stopped-by-kernel-limit", message=message))
    if finished.proof.stopped_by == "warm-start":
        message = (
            f"Only {finished.proof.fits} was run, to confirm the recommendation of the warm start; that "
            f"{finished.proof.next_size} fails was measured then. Tune without a warm start to measure it now."
        )
        found.append(Advice(code="rests-on-warm-start", message=message))
    if not finished.proof.is_conclusive:
        found.append(Advice(code="larger-sizes-not-known", message=finished.proof.statement))
    found += [_not_estimated(changes) for changes in finished.what_if.not_estimated]
    found += _warnings_of_coupling(finished)
    found += _warnings_of_parallelism(finished.request, finished.probes)
    found += _few_divisors(finished)
    return found + _warnings_of_command(finished) + _warnings_of_files(finished.probes)


def _warnings_of_files(probes: Sequence[ProbeResult]) -> list[Advice]:
    """Name the files that probes of a command wrote outside of their folders."""
    files = WrittenFiles.of_all([probe.files for probe in probes if probe.files is not None])
    if not files.counts:
        return []
    message = (
        f"The probes wrote outside of their own folders: they {files.in_words}. Have the command write to "
        "`{output_dir}`, or give probes an argument or a variable of their own with which it writes nothing "
        "(`--probe-argument`, `--probe-env`)."
    )
    return [Advice(code="files-written", message=message)]


def _warnings_of_command(finished: FinishedTuning) -> list[Advice]:
    """Warn of what the counted figures of the plan leave open."""
    fit = finished.plan_proof.fit if finished.plan_proof is not None else None
    if finished.request.command is None or fit is None or fit.counted is None:
        return []
    found, counted = [], fit.counted
    if counted.as_planned is None:
        message = (
            f"That an update has the samples of the plan was not verified: {counted.statement}. `--samples-dimension`, "
            "`--samples-per-unit` and `--no-count-samples` say what a sample is."
        )
        found.append(Advice(code="samples-not-verified", message=message))
    found += [Advice(code=code, message=message) for code, message in counted.unseen.items()]
    varying = [
        f"{name} from {' x '.join(str(low) for low, _ in sizes)} to {' x '.join(str(high) for _, high in sizes)}"
        for name, sizes in counted.shapes.items()
        if any(low != high for low, high in sizes[1:])
    ]
    if varying:
        seen = counted.ranks[0].backward_passes
        message = (
            f"The sizes of samples vary: {'; '.join(varying)} in {len(seen)} updates of together {sum(seen)} backward "
            "passes. A later batch may be larger, and take more memory. Pad to the largest size, select the largest "
            "samples in probes (`--probe-argument`), or watch more updates (`--probe-updates`)."
        )
        found.append(Advice(code="sizes-vary", message=message))
    if counted.batch_norms and finished.size < finished.share:
        message = (
            "The program trains with batch norms. Their statistics are those of a micro-batch, so an update of several "
            "is not that of the whole batch, whatever the loss scaling. Use GroupNorm or LayerNorm, or freeze the "
            "statistics, if that matters. Other couplings of samples are not looked for in a command."
        )
        found.append(Advice(code="batch-coupled-modules", message=message))
    return found


def _few_divisors(finished: FinishedTuning) -> list[Advice]:
    """Name nearby effective batches that a command could take in far fewer micro-batches, as it repeats one size."""
    request, size = finished.request, finished.size
    if request.command is None or not size or request.objective == "fastest":
        return []
    ranks, largest = request.spec.parallelism.world_size, _expected_largest(finished)
    near = [
        batch
        for batch in uniform_plan(request.effective_batch_size, ranks, largest).nearest
        if batch.micro_batch_size >= _WORTH_ANOTHER_BATCH * size
        and batch.micro_batch_size % request.granularity == 0
        and batch.effective_batch_size != request.effective_batch_size
    ]
    if not near:
        return []
    each = f"{ranks} ranks x " if ranks > 1 else ""
    plans = " and ".join(
        f"{batch.effective_batch_size} = {each}{batch.gradient_accumulation_steps} x {batch.micro_batch_size}"
        for batch in near
    )
    known = "known to fit" if largest <= finished.proof.fits else "expected to fit"
    message = (
        f"A program repeats one micro-batch size, so only divisors of the {finished.share} samples of a rank can be "
        f"used, and {size} is the largest that fits. Effective batches nearby divide better: {plans}, {known}, with "
        f"{near[0].gradient_accumulation_steps} passes in an update instead of {finished.share // size}."
    )
    return [Advice(code="few-divisors", message=message)]


def _expected_largest(finished: FinishedTuning) -> int:
    """The largest size that is expected to fit, were every size possible: at least the largest that was proven.

    The memory of two sizes gives a line. One size alone gives what a sample takes at most: all of the peak that is not
    held between micro-batches.
    """
    proof, request = finished.proof, finished.request
    if not request.searches_divisors:
        return proof.fits
    held = {
        probe.micro_batch_size: (probe.held_bytes or 0, probe.resident_bytes or 0)
        for probe in finished.probes
        if probe.outcome is Outcome.FIT
    }
    if not held:
        return proof.fits
    (low, (least, resident)), (high, (most, _)) = min(held.items()), max(held.items())
    per_sample = (most - least) / (high - low) if high > low else (most - resident) / high
    room = max(0, finished.probe_limit_bytes - most)
    expected = high + int(room / per_sample) if per_sample > 0 else high
    bounds = [bound for bound in (proof.next_size and proof.next_size - 1, request.max_micro_batch_size) if bound]
    return max(proof.fits, min([expected, finished.share, *bounds]))


def _warnings_of_coupling(finished: FinishedTuning) -> list[Advice]:
    check = finished.coupling
    if check is None or check.verdict == "separate":
        return []
    if check.verdict == "not-compared":
        message = (
            f"Whether the loss couples the samples of a batch could not be checked: {check.message} If it does, "
            "accumulated updates differ from full-batch ones."
        )
        return [Advice(code="coupling-not-checked", message=message)]
    if finished.request.spec.parallelism.world_size == 1 and finished.size == finished.share:
        message = f"{check.message} This plan is exact, as it has the whole batch in one micro-batch; no other one is."
        return [Advice(code="coupled-loss", message=message)]
    return [Advice(code="coupled-loss", message=check.message)]


def _warnings_of_probe(probe: ProbeResult, device: DeviceInfo) -> list[Advice]:
    notes = probe.model.config_notes if probe.model is not None else ()
    found = [Advice(code="undeclared-config-fields", message=note) for note in notes]
    if probe.model is not None and probe.model.in_eval_mode:
        message = (
            "The model was measured in eval mode, in which it was given: without dropout, and with fixed statistics of "
            "BatchNorm. If training calls `model.train()`, call it before the tuning too: dropout takes more memory."
        )
        found.append(Advice(code="model-in-eval-mode", message=message))
    if probe.model is not None and probe.model.batch_coupled_modules:
        message = (
            f"{listed(probe.model.batch_coupled_modules, 3)}: their statistics are those of a micro-batch, so "
            "accumulated updates differ from full-batch ones whatever the loss scaling. Use GroupNorm or LayerNorm, or "
            "freeze the statistics, if that matters."
        )
        found.append(Advice(code="batch-coupled-modules", message=message))
    if (probe.other_processes_bytes or 0) > _SHARED_DEVICE_BYTES:
        message = (
            f"Other processes held {format_bytes(probe.other_processes_bytes or 0)} of {device.id} while it was "
            "probed: the recommendation is valid while they hold no more."
        )
        found.append(Advice(code="shared-device", message=message))
    if probe.allocator_retries:
        times = "once" if probe.allocator_retries == 1 else f"{probe.allocator_retries} times"
        message = (
            f"At this size the allocator gave back its cache and tried again, {times} in one update: it fits, but "
            "slowly. The objective `fastest` measures what a smaller micro-batch gains."
        )
        found.append(Advice(code="thrashing-fit", message=message))
    return found


def _warnings_of_parallelism(request: TuningRequest, probes: Sequence[ProbeResult]) -> list[Advice]:
    if request.command is not None or request.spec.parallelism.world_size == 1:
        return []
    found = []
    if (simulated := simulated_ranks_of(probes)) is not None:
        message = (
            f"One rank was probed in a process group of {simulated} whose other ranks did not run. Its shards and "
            "buffers were as large as with all of them."
        )
        found.append(Advice(code="ranks-simulated", message=message))
    if any(probe.ranks for probe in probes):
        return found
    message = (
        "Gradient buckets were held as in a distributed run, but the buffers of the communication library are not in "
        "the measurement (NCCL: 0.5 to 1.6 GB per communicator, outside torch's allocator)."
    )
    found.append(Advice(code="communication-buffers-not-probed", message=message))
    return found


def simulated_ranks_of(probes: Sequence[ProbeResult]) -> int | None:
    """The ranks for which one stood in the probes; none where all ran, or there is one."""
    return next((probe.simulated_ranks for probe in probes if probe.simulated_ranks is not None), None)


def _probes_in_words(request: TuningRequest, probes: Sequence[ProbeResult]) -> str:
    """The ranks of the probes and the weights of a pretrained model, as the end of a proof's statement."""
    ranks = max((len(probe.ranks) for probe in probes), default=0)
    words = f" All {ranks} ranks ran." if ranks else ""
    if (simulated := simulated_ranks_of(probes)) is not None:
        words = f" One rank ran, in a simulated group of {simulated} ranks."
    if request.command is None and request.workload.is_pretrained:
        words += " Probes had random weights of the pretrained model's shapes, as memory does not depend on values."
    return words
