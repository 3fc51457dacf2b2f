"""Gain of a recommended plan over the one that a training uses until now. Pure, no torch.

Figures come from the probes alone: from updates that were timed for the objective ``fastest``, from the single updates
that other probes time, or interpolated between those. Nothing is extrapolated beyond the probed sizes.
"""

from dataclasses import dataclass
from typing import Literal

from batchwright.planning.accumulation import balanced_split, plan_size, share_per_rank, steps_of
from batchwright.planning.plan_figures import expected_bytes, expected_rate, format_rate, rate_of
from batchwright.schemas.plans import PlanSummary, format_sizes
from batchwright.schemas.recommendation import Gain, Proof, Recommendation
from batchwright.schemas.requests import Baseline, TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.units import format_bytes, format_share

_Source = Literal["measured", "estimated"]


def with_gain(found: Recommendation) -> Recommendation:
    """Return the recommendation with its gain over the baseline of its request, if both are there."""
    return found.model_copy(update={"gain": gain_of(found)})


def gain_of(found: Recommendation) -> Gain | None:
    """The gain over the baseline of the request; none without a baseline, and where nothing fits."""
    baseline, room = found.request.baseline, found.headroom
    chosen = next((plan for plan in found.alternatives if plan.chosen), None)
    if baseline is None or found.plan is None or room is None or chosen is None:
        return None
    before = _Before(found.request, baseline, found.evidence.probes, found.evidence.proof)
    speed, speed_source = before.rate(), None
    after, peak, peak_before = chosen.samples_per_second, chosen.peak_bytes or room.peak_bytes, before.peak_bytes()
    speedup = after / speed if after and speed else None
    if speedup is not None:
        both_timed = before.is_timed and chosen.timed_updates > 1
        speed_source = _source(measured=both_timed and before.plan.exact)
    use = f"{format_share(peak / room.limit_bytes)} of {format_bytes(room.limit_bytes)}"
    if peak_before is not None:
        use = f"{format_share(peak_before / room.limit_bytes)}{' (estimated)' if before.fit is None else ''} -> {use}"
    compared = f"{_in_words(before.sizes)} -> {_in_words(found.plan.micro_batch_sizes[0])}"
    return Gain(
        baseline=before.plan,
        baseline_fits=before.fits,
        speedup=speedup,
        speed_source=speed_source,
        samples_per_second=after,
        baseline_samples_per_second=speed,
        peak_bytes=peak,
        baseline_peak_bytes=peak_before,
        memory_source=None if peak_before is None else _source(measured=before.fit is not None),
        limit_bytes=room.limit_bytes,
        statement=_statement(before, compared, f"memory use {use}", speedup, speed_source),
    )


@dataclass(frozen=True)
class _Before:
    """The baseline, and what the probes show of it."""

    request: TuningRequest
    baseline: Baseline
    probes: tuple[ProbeResult, ...]
    proof: Proof

    @property
    def size(self) -> int:
        return self.baseline.micro_batch_size

    @property
    def _target(self) -> int:
        """Samples of the rank with the most in an update of the request."""
        return share_per_rank(self.request.effective_batch_size, self.request.spec.parallelism.world_size)[0]

    @property
    def share(self) -> int:
        """Samples of a rank in an update of the baseline."""
        steps = self.baseline.accumulation_steps
        return max(self._target, self.size) if steps is None else steps * self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batches of a rank in an update of the baseline."""
        return balanced_split(self.share, steps_of(self.share, self.size))

    @property
    def plan(self) -> PlanSummary:
        requested, ranks = self.request.effective_batch_size, self.request.spec.parallelism.world_size
        effective = requested if self.share == self._target else self.share * ranks
        return PlanSummary(
            gradient_accumulation_steps=steps_of(self.share, self.size),
            micro_batch_size=self.size,
            world_size=ranks,
            effective_batch_size=effective,
            requested_effective_batch_size=requested,
            exact=effective == requested,
        )

    @property
    def fit(self) -> ProbeResult | None:
        """The fit of the size, in updates of one or of several micro-batches as the baseline's are."""
        same = [probe for probe in self._fits if probe.accumulates == (self.size < self.share)]
        return max(same, key=lambda probe: probe.measures_time, default=None)

    @property
    def _fits(self) -> list[ProbeResult]:
        fits = [probe for probe in self.probes if probe.outcome is Outcome.FIT and not probe.brackets]
        return [probe for probe in fits if probe.micro_batch_size == self.size]

    @property
    def fits(self) -> bool | None:
        if self.fit is not None:
            return True
        failed = [probe.micro_batch_size for probe in self.probes if probe.outcome is Outcome.OOM]
        if self.proof.shows_larger_fail and self.proof.next_size is not None:
            failed.append(self.proof.next_size)
        if any(self.size >= size for size in failed) and self.size < self.share:
            return False
        return True if self.size <= self.proof.fits else None

    @property
    def _timed(self) -> ProbeResult | None:
        """The timing of the baseline's plan, whose sizes are balanced for the requested batch."""
        size = plan_size(self.share, steps_of(self.share, self.size))
        timed = (probe for probe in self.probes if probe.measures_time and probe.outcome is Outcome.FIT)
        return next((probe for probe in timed if probe.micro_batch_size == size and probe.timing is not None), None)

    @property
    def is_timed(self) -> bool:
        """True if several updates of the plan were timed."""
        return self._timed is not None

    def rate(self) -> float | None:
        """Samples per second; none where the probes do not show them, or the baseline does not fit."""
        if not self.fits:
            return None
        probe = self._timed or self.fit
        exact = None if probe is None else rate_of(self.share, probe)
        return exact if exact is not None else expected_rate(self.share, self.size, self.probes)

    def peak_bytes(self) -> int | None:
        """Most memory held; none where the probes do not show it."""
        if not self.fits:
            return None
        return expected_bytes(self.share, self.size, self.probes) if self.fit is None else self.fit.held_bytes


def _source(*, measured: bool) -> _Source:
    return "measured" if measured else "estimated"


def _in_words(sizes: tuple[int, ...]) -> str:
    """The micro-batches of a rank: ``64 x 4``, or ``4 x 37 + 3 x 36`` where they differ."""
    return f"{len(sizes)} x {sizes[0]}" if sizes[0] == sizes[-1] else format_sizes(sizes)


def _statement(before: _Before, compared: str, memory: str, speedup: float | None, source: _Source | None) -> str:
    plan = before.plan
    if before.fits is False:
        text = f"{compared}: the baseline's micro-batch of {before.size} does not fit into this limit"
    elif speedup is None:
        text = f"{compared}: {memory}. The earlier plan was not timed"
    else:
        about = "about " if source == "estimated" else ""
        rate = f"{about}{format_rate(speedup)}x {'faster' if speedup > 1.0 else 'the speed'}"
        rate = "equally fast" if abs(speedup - 1.0) < _ALIKE else rate
        text = f"{compared}: {rate} ({source}); {memory}"
    if plan.exact:
        return f"{text}."
    return (
        f"{text}. The baseline's effective batch is {plan.effective_batch_size}, not "
        f"{plan.requested_effective_batch_size}: samples are compared, not updates."
    )


_ALIKE = 0.005
"""Relative differences of speed below this are not written out."""
