"""The course of a tuning: its recorded probes, and what they have established so far. Pure, no torch."""

from dataclasses import replace

from batchwright.planning.plan_figures import PlanCandidates
from batchwright.planning.proofs.counted_plans import judge_over_sizes
from batchwright.planning.proofs.plan_proof import PlanProof, prove_plan, whole_share_proof
from batchwright.planning.search import Failure, MicroBatchSearch
from batchwright.planning.tuning_conditions import TuningConditions
from batchwright.planning.warm_start import PossibleWarmStart, confirmed_proof
from batchwright.schemas.recommendation import Proof, StopReason
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import PLAN_NOT_FOLLOWED, ExpectedPeaks, Outcome, ProbeResult


class Course:
    """The course of a tuning, which is rebuilt by recording the same results.

    Args:
        conditions: the conditions of the tuning.

    Attributes:
        probes: the results recorded so far, in order.
        search: the search for the largest size.
        warm_start: the stored recommendation that seeds the search, if there is one.
        stopped_at: the largest size whose plan was proven when the tuning was stopped; None where it was not.
    """

    def __init__(self, conditions: TuningConditions) -> None:
        self.conditions = conditions
        self.probes: list[ProbeResult] = []
        self.warm_start: PossibleWarmStart | None = None
        self.stopped_at: int | None = None
        self.seed(None)

    def seed(self, peaks: ExpectedPeaks | None) -> None:
        """Begin the search anew with an estimate: it changes the order of probes but never the result."""
        conditions = self.conditions
        space = replace(conditions.space, expected=peaks)
        of_command = conditions.request.command is not None
        self.search = MicroBatchSearch(space, of_command=of_command)
        for probe in self.probes:
            if probe.shows_size or (conditions.request.quick and probe.micro_batch_size in space):
                self.search.tell(probe)

    @property
    def searched(self) -> list[ProbeResult]:
        """The probes that show which sizes fit. Other runs of plans must not change the conclusions of the search."""
        return [probe for probe in self.probes if probe.shows_size]

    @property
    def has_unclear_plan_run(self) -> bool:
        """True after a run of a plan that did not show if its size fits. Sizes are then probed alone."""
        return any(probe.runs_plan and not probe.shows_size for probe in self.probes)

    @property
    def whole_share_probe(self) -> ProbeResult | None:
        """The probe of a rank's whole share in one micro-batch, if it has run."""
        share = self.conditions.share
        return next((probe for probe in self.searched if probe.micro_batch_size == share), None)

    @property
    def is_confirmed(self) -> bool:
        """Whether a probe has confirmed the stored recommendation, so that nothing is left to search."""
        return self._confirmed() is not None

    def is_confirmed_by(self, result: ProbeResult) -> bool:
        """Return whether the stored recommendation is confirmed once a result is recorded, if not before."""
        return self._confirmed(result) is not None

    def _confirmed(self, *following: ProbeResult) -> Proof | None:
        """The proof that rests on a stored proof which a probe has confirmed."""
        if self.warm_start is None or self.search.verdict is not None:
            return None
        return confirmed_proof(self.warm_start, [*self.probes, *following], self.conditions)

    @property
    def verdict(self) -> Proof | Failure | None:
        """The verdict of the search, or the confirmed stored proof, or the proof of the whole share if that fitted."""
        verdict, whole = self.search.verdict or self._confirmed(), self.whole_share_probe
        fits_whole = whole is not None and whole.outcome is Outcome.FIT
        if isinstance(verdict, Proof) and verdict.fits < self.conditions.share and fits_whole:
            return whole_share_proof(self.conditions.share, verdict)
        return verdict

    @property
    def proof(self) -> Proof | None:
        """The proof of the largest size; None before the end of the search, and when it failed."""
        verdict = self.verdict
        return verdict if isinstance(verdict, Proof) else None

    def planned_request(self, proof: Proof) -> TuningRequest:
        """The request, with the largest micro-batch as its effective batch where updates do not accumulate."""
        request = self.conditions.request
        if self.conditions.accumulates or not proof.fits:
            return request
        return request.model_copy(update={"effective_batch_size": proof.fits})

    def plan_proof(self, proof: Proof) -> PlanProof | None:
        """The plan to recommend, and what the probes show of it; None where nothing fits."""
        if not proof.fits:
            return None
        size = self.stopped_at
        if size is None:
            size = self.conditions.objective.recommended_size(self.candidates(proof))
        return self.proof_of(size, proof)

    def candidates(self, proof: Proof) -> PlanCandidates:
        """The plans among which the objective chooses."""
        conditions = self.conditions
        return PlanCandidates(
            conditions.share,
            proof.fits,
            self.probes,
            repeats=conditions.repeats,
            granularity=conditions.request.granularity,
        )

    def proof_of(self, size: int, proof: Proof) -> PlanProof:
        """What the probes show of the plan in micro-batches of at most ``size``."""
        return prove_plan(self.planned_request(proof), size, self.probes)

    # --- reasons to end before the last stage has ended ---

    @property
    def misled(self) -> ProbeResult | None:
        """The probe of a command that did not train by its figures; None where all did."""
        for probe in self.probes:
            is_fit = probe.outcome is Outcome.FIT
            judged = judge_over_sizes(probe, self.probes, self.conditions.share) if is_fit else None
            if judged is not None and judged.as_planned is False:
                return probe.model_copy(update={"message": judged.statement})
            if probe.error_type == PLAN_NOT_FOLLOWED:
                return probe
        return None

    @property
    def overwriting(self) -> ProbeResult | None:
        """The probe of a command that replaced files of the user, who has not allowed that; None where none did."""
        command = self.conditions.request.command
        if command is None or command.model.allow_overwriting:
            return None
        return next(
            (probe for probe in self.probes if probe.files is not None and probe.files.counts.get("replaced")), None
        )

    @property
    def is_over(self) -> bool:
        """Whether the tuning was stopped, or has to end: stages are asked no more."""
        return self.stopped_at is not None or self.misled is not None or self.overwriting is not None

    def stop(self, stopped_by: StopReason = "interrupted") -> bool:
        """End the tuning before its end; return whether the probes so far prove a plan, which it then recommends."""
        self.search.stopped_by = stopped_by
        proof = self.proof
        if proof is not None and self.misled is None:
            fits = {probe.micro_batch_size for probe in self.probes if probe.outcome is Outcome.FIT}
            for size in sorted((size for size in fits if size <= proof.fits), reverse=True):
                if not self.proof_of(size, proof).needs_run:
                    self.stopped_at = size
                    return True
        self.search.stopped_by = None
        return False
