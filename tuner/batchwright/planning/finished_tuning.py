"""A finished tuning: its evidence, and the conditions under which it was found. Pure, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchwright.planning.accumulation import share_per_rank
from batchwright.planning.comparison.what_if import WhatIfResult
from batchwright.planning.proofs.plan_proof import PlanProof
from batchwright.planning.tuning_conditions import TuningConditions
from batchwright.schemas.recommendation import CouplingCheck, DataReading, Proof, WarmStart
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import ExpectedPeaks, Outcome, ProbeResult


@dataclass(frozen=True)
class FinishedTuning:
    """A finished tuning.

    Attributes:
        conditions: the conditions of the search.
        request: the request, with the plan's effective batch where the requested one is only a bound.
        proof: the proof of the largest size.
        plan_proof: the plan to recommend, and its proof; None where nothing fits.
        probes: every probe.
        notes: results that contradict the assumptions of the search.
        expected: the estimate that led the search.
        late_estimate: a sentence about an estimate that was missing when the search began; None where none was.
        warm_start: the stored recommendation that seeded the search.
        what_if: estimated changes of the spec.
        coupling: the outcome of the check for coupled samples.
        data: the reading of the data before the first probe; None if no file is named.
        step_seconds: the time of each step that is no probe, by its name in ``Timings``.
    """

    conditions: TuningConditions
    request: TuningRequest
    proof: Proof
    plan_proof: PlanProof | None
    probes: tuple[ProbeResult, ...]
    notes: tuple[str, ...] = ()
    expected: ExpectedPeaks | None = None
    late_estimate: str | None = None
    warm_start: WarmStart | None = None
    what_if: WhatIfResult = field(default_factory=WhatIfResult)
    coupling: CouplingCheck | None = None
    data: DataReading | None = None
    step_seconds: Mapping[str, float] = field(default_factory=dict)

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

    @property
    def simulated_ranks(self) -> int | None:
        """The ranks for which one stood in the probes; None where all ran, or there is one."""
        return next((probe.simulated_ranks for probe in self.probes if probe.simulated_ranks is not None), None)
