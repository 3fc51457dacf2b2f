"""The recommendation that the evidence of a finished search supports. Pure, no torch."""

from datetime import datetime

from batchwright.planning.accumulation import balanced_plan, repeated_plan, steps_of, uniform_plan
from batchwright.planning.comparison.gain import with_gain
from batchwright.planning.finished_tuning import FinishedTuning
from batchwright.planning.plan_figures import PlanCandidates, alternatives
from batchwright.planning.proofs.coupled_loss import is_undivided
from batchwright.planning.proofs.plan_proof import format_window
from batchwright.planning.warnings.infeasibility import infeasible_reason
from batchwright.planning.warnings.tuning_warnings import tuning_warnings
from batchwright.schemas.recommendation import (
    Alternative,
    CouplingCheck,
    Evidence,
    Headroom,
    Recommendation,
    Timings,
)
from batchwright.schemas.results import Outcome, ProbeResult

_COMMAND_NOT_COMPARED = CouplingCheck(
    verdict="not-compared",
    message="A command's loss cannot be called on parts of a batch. Batch norms are looked for while it trains.",
)


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
    ranks = max((len(probe.ranks) for probe in finished.probes), default=0)
    words = f" All {ranks} ranks ran." if ranks else ""
    if finished.simulated_ranks is not None:
        words = f" One rank ran, in a simulated group of {finished.simulated_ranks} ranks."
    if finished.request.command is None and finished.request.workload.is_pretrained:
        words += " Probes used random weights in the pretrained model's shapes: memory does not depend on their values."
    statement = finished.proof.statement + words
    proof = finished.proof.model_copy(update={"statement": statement})
    probes = finished.probes
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
            simulated_ranks=finished.simulated_ranks,
            plan_proof=finished.plan_proof.statement if finished.plan_proof else "",
            expected=finished.expected,
            warm_start=finished.warm_start,
            coupling=finished.coupling if request.command is None else _COMMAND_NOT_COMPARED,
            data=finished.data,
        ),
        headroom=_headroom(finished),
        device=finished.conditions.device,
        fingerprint=finished.conditions.fingerprint,
        environment=finished.conditions.environment,
        warnings=tuple(tuning_warnings(finished)),
        versions=finished.conditions.versions,
        timings=Timings(
            total_seconds=total_seconds,
            probe_seconds=sum(probe.seconds.total for probe in probes),
            **{f"{step}_seconds": seconds for step, seconds in finished.step_seconds.items()},
            probes=len(probes),
            out_of_memory_probes=sum(probe.outcome is Outcome.OOM for probe in probes),
        ),
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
    return finished.size if finished.conditions.objective.times_plans else finished.proof.fits


def _choice(finished: FinishedTuning, listed: tuple[Alternative, ...]) -> str:
    request = finished.request
    if finished.plan_proof is not None and finished.plan_proof.failed:
        run, share = finished.plan_proof.failed[0], finished.share
        return (
            f"The {steps_of(share, run.micro_batch_size)}-step plan ({format_window(run.micro_batch_sizes)}) "
            f"{'ran out of memory' if run.outcome is Outcome.OOM else 'is not valid'}, so the plan has "
            f"{steps_of(share, finished.size)} steps of at most {finished.size}."
        )
    bounded = request.max_micro_batch_size is not None and request.max_micro_batch_size < finished.share
    return finished.conditions.objective.describe_choice(
        finished.share,
        finished.size,
        finished.proof,
        listed,
        of_a_grid=request.granularity > 1 or bounded or request.searches_divisors,
    )


def _alternatives(finished: FinishedTuning) -> tuple[Alternative, ...]:
    if not finished.size:
        return ()
    plans = PlanCandidates(
        finished.share,
        finished.proof.fits,
        finished.probes,
        repeats=finished.conditions.repeats,
        granularity=finished.request.granularity,
    )
    listed = alternatives(plans, finished.size)
    command = finished.request.command
    makes_its_own = command is not None and not command.model.takes_accumulation
    only_chosen = makes_its_own or is_undivided(finished.request, finished.coupling)
    if only_chosen or not finished.conditions.accumulates:
        return tuple(plan for plan in listed if plan.chosen)
    return listed


def _headroom(finished: FinishedTuning) -> Headroom | None:
    probe = finished.deciding_probe
    if probe is None:
        return None
    limit, peak = finished.conditions.memory_limit_bytes, probe.held_bytes or 0
    available = min(limit, finished.conditions.device.total_bytes - (probe.other_processes_bytes or 0))
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
