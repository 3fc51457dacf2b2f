"""The proof of the recommended plan: a fit that was at least as demanding, or a run of the plan itself. Pure, no torch.

The search proves a size by updates of whole micro-batches of it (``batchwright.planning.accumulation.probe_window``).
They are at least as demanding as a plan that repeats one size up to the proven one (``is_as_demanding``): such a plan
needs no probe of its own. A plan of two sizes (34 + 33 + 33) is run by one more probe, after the search and the timing
of plans, unless its timing has run the same, or the search ran it: a plan that begins with two micro-batches of the
proven size (46 + 46 + 45 + 45) proves that size too. Of several ranks, whose shares differ by one sample at most,
the first whose micro-batches differ is run: those of any other rank are equal, or of the same two sizes in other
numbers.

A plan that runs out of memory is followed by the next smaller one, and every further one leaves out twice as many sizes
as the one before: after at most ``log2(size) + 2`` probes a plan is found that ran, or repeats one size. A run that
shows neither (it timed out, failed by an error, or was lost twice) ends the tuning with a warning.

The module also extrapolates whether the whole share of a rank is worth a probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.planning.accumulation import (
    condensed,
    divisors_up_to,
    is_as_demanding,
    plan_size,
    plan_window,
    share_per_rank,
    steps_of,
)
from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.proofs.counted_plans import judge_over_sizes, own_steps
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult


@dataclass(frozen=True)
class PlanProof:
    """The recommended plan, and the evidence of the probes for it.

    Attributes:
        size: the plan's micro-batches are at most this large.
        share: samples in an update of the rank whose micro-batches are run or compared.
        window: the micro-batches that stand for this rank's.
        fit: the fit that was at least as demanding; none before the plan has run.
        inconclusive: the run of the plan that showed neither that it fits nor that it does not.
        failed: the runs of larger plans, which did not fit.
        refusal: why there is no plan although the size fits; empty where there is one.
    """

    size: int
    share: int
    window: tuple[int, ...]
    fit: ProbeResult | None = None
    inconclusive: ProbeResult | None = None
    failed: tuple[ProbeResult, ...] = ()
    refusal: str = ""

    @property
    def needs_run(self) -> bool:
        """Return whether the plan has to be run."""
        return self.fit is None and self.inconclusive is None and not self.refusal

    @property
    def statement(self) -> str:
        """The proof of the plan in a few sentences."""
        failures = (
            f"The plan in micro-batches of {format_window(run.micro_batch_sizes)} "
            f"{'ran out of memory' if run.outcome is Outcome.OOM else 'is not valid'}"
            f"{f' ({run.message})' if run.message else ''}."
            for run in self.failed
        )
        return " ".join([*failures, self._own_statement()])

    def _own_statement(self) -> str:
        if self.refusal:
            return self.refusal
        window = format_window(self.window)
        if self.inconclusive is not None:
            return (
                f"It is not known whether the plan fits: its own run, in micro-batches of {window}, ended "
                f"with {self.inconclusive.outcome} ({self.inconclusive.message})."
            )
        if self.fit is None:
            return "The plan has not run yet."
        if self.fit.counted is not None:
            return f"The plan was run as it will be trained: {self.fit.counted.statement}."
        if condensed(self.fit.micro_batch_sizes) == self.window:
            steps = steps_of(self.share, self.window[0])
            count = len(self.window)
            run = f"{count} of the plan's {steps} micro-batches" if steps > count else "the plan itself"
            return f"Verified by running {run} ({window})."
        ran = format_window(self.fit.micro_batch_sizes)
        kind = "another" if self.window[0] == self.fit.micro_batch_size else "a larger"
        return f"Verified by {kind} run: {ran} fits, and the plan uses {window}."


def format_window(sizes: Sequence[int]) -> str:
    """Format the micro-batches of an update as a sum: ``34 + 33 + 33``."""
    return " + ".join(str(size) for size in sizes)


def prove_plan(request: TuningRequest, size: int, probes: Sequence[ProbeResult]) -> PlanProof:
    """The largest plan in micro-batches of at most ``size`` that the probes do not show to fail, and its proof.

    Args:
        request: the request, with the effective batch and the ranks.
        size: the micro-batch size that the search or the timing chose.
        probes: every probe.
    """
    if request.command is not None:
        return _prove_plan_of_command(request, size, probes)
    shares = share_per_rank(request.effective_batch_size, request.spec.parallelism.world_size)
    failed: list[ProbeResult] = []
    chosen = size
    while True:
        steps = steps_of(shares[0], size)
        windows = [(each, plan_window(each, steps)) for each in dict.fromkeys(shares)]
        share, window = next((each for each in windows if len(set(each[1])) > 1), windows[0])
        size = plan_size(shares[0], steps)
        runs = [  # a timed run may have had a shorter window
            run
            for run in probes
            if run.runs_plan
            and (run.micro_batch_size == size if run.measures_time else run.micro_batch_sizes == window)
        ]
        stopped = next((run for run in runs if run.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}), None)
        if stopped is None or size == 1:
            break
        failed.append(stopped)
        size = max(1, size - (1 << (len(failed) - 1)))
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and not probe.brackets]
    fit = max(
        (probe for probe in fits if is_as_demanding(probe.micro_batch_sizes, window)),
        key=lambda probe: (condensed(probe.micro_batch_sizes) == window, probe.micro_batch_size),
        default=None,
    )
    return PlanProof(size if failed else chosen, share, window, fit, _inconclusive(runs), tuple(failed))


def _prove_plan_of_command(request: TuningRequest, size: int, probes: Sequence[ProbeResult]) -> PlanProof:
    """The largest plan of a command that its own run does not show to fail: only a run of its very figures is a proof.

    Its micro-batches divide the share, so that after a plan that did not fit the next smaller divisor follows.
    """
    share = request.effective_batch_size // request.spec.parallelism.world_size
    if request.command is not None and not request.command.model.takes_accumulation:
        return _prove_updates_of_command(share, request.spec.parallelism.world_size, size, probes)
    sizes = divisors_up_to(share, size)
    failed: list[ProbeResult] = []
    for chosen in reversed(sizes):
        window = plan_window(share, share // chosen)
        runs = [probe for probe in probes if probe.verifies_plan and probe.micro_batch_size == chosen]
        stopped = next((run for run in runs if run.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}), None)
        if stopped is None or chosen == sizes[0]:
            break
        failed.append(stopped)
    own = [probe for probe in probes if probe.micro_batch_size == chosen and probe.outcome is Outcome.FIT]
    fit = next((probe for probe in own if probe.counted is not None and probe.counted.of_plan), None)
    if fit is not None:
        fit = fit.model_copy(update={"counted": judge_over_sizes(fit, probes, share)})
    return PlanProof(chosen, share, window, fit, _inconclusive(runs), tuple(failed))


def _prove_updates_of_command(share: int, ranks: int, size: int, probes: Sequence[ProbeResult]) -> PlanProof:
    """The plan of a command that takes no accumulation: the updates that it makes itself, where they have the samples.

    It may derive its accumulation from a total of its own, or make every update of one micro-batch.
    """
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.counted is not None]
    counts = [(fit.counted.ranks[0], fit.micro_batch_size) for fit in fits if fit.counted is not None]
    made = {tried: own_steps(rank, tried) for rank, tried in counts}
    following = [each for each, passes in made.items() if each * passes == share and each <= size]
    if not made or following:
        chosen = max(following, default=size)
        fit = next((fit for fit in fits if fit.micro_batch_size == chosen), None)
        if fit is not None:
            fit = fit.model_copy(update={"counted": judge_over_sizes(fit, probes, share)})
        return PlanProof(chosen, share, plan_window(share, share // chosen), fit)
    largest = max(made)
    samples = largest * made[largest]
    refusal = (
        f"Micro-batches of {largest} fit, but the command takes no accumulation, so its updates have "
        f"{samples} samples{' on each rank' if ranks > 1 else ''} ({made[largest]} x {largest}) instead of "
        f"{share}. Pass it {{gradient_accumulation_steps}} or {{effective_batch_size}}, or tune with "
        f"--effective-batch-size {samples * ranks}{' or less' if made[largest] == 1 else ''}."
    )
    return PlanProof(largest, share, (largest,) * made[largest], refusal=refusal)


def _inconclusive(runs: Sequence[ProbeResult]) -> ProbeResult | None:
    """The run of a plan after which the plan is not run again, although the run shows nothing of memory."""
    untimed = [run for run in runs if not run.measures_time]
    lost = [run for run in untimed if run.outcome is Outcome.LOST]
    others = [run for run in untimed if run.outcome in {Outcome.ERROR, Outcome.TIMED_OUT}]
    return others[0] if others else lost[-1] if len(lost) >= PARAMETERS.most_lost_probes else None


def longer_as_plan(fits: Sequence[ProbeResult], size: int, share: int) -> float:
    """Estimate how many times longer a probe of a size takes with the micro-batches of its plan.

    A probe makes two updates of two micro-batches; as a plan, one whole update and two micro-batches of the next.
    """
    start = min(fit.seconds.start + fit.seconds.build for fit in fits)
    largest = max(fits, key=lambda fit: fit.micro_batch_size)
    seconds = largest.seconds.measure * size / sum(largest.micro_batch_sizes)
    short = start + 4 * seconds
    return (start + (share // size + 2) * seconds) / short if short else 1.0


# --- the whole share ---


def peak_without_gradients(probes: Sequence[ProbeResult], size: int) -> float | None:
    """Extrapolate the peak in bytes at ``size`` in an update of one micro-batch; none without enough measurements.

    The peak is on the line through the two largest fits of accumulating updates, less the gradients. Where there is one
    such fit, the line begins at what is resident with the gradients. Fits whose peak the limit may have cut off are
    left out, because the line through them is too flat.
    """
    measured = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.used_bytes and probe.accumulates]
    fits = {probe.micro_batch_size: probe for probe in measured}
    if not fits:
        return None
    complete = {at: fit for at, fit in fits.items() if not _may_be_cut_off(fit)}
    informative = complete or {max(fits): fits[max(fits)]}
    high = informative[max(informative)]
    if high.model is None:
        return None
    gradients = high.model.gradient_bytes
    points: list[tuple[int, float]] = [(at, informative[at].used_bytes or 0) for at in sorted(informative)[-2:]]
    if len(points) == 1:
        if high.resident_bytes is None:
            return None
        points.insert(0, (0, high.resident_bytes + gradients))
    (low_size, low_used), (high_size, high_used) = points
    return high_used + (high_used - low_used) / (high_size - low_size) * (size - high_size) - gradients


def _may_be_cut_off(fit: ProbeResult) -> bool:
    """Return whether the limit may have cut off the requests of a process's libraries."""
    if fit.process_peak_bytes is None or fit.limit_bytes is None:
        return False
    return fit.process_peak_bytes > PARAMETERS.saturated_share * fit.limit_bytes


def whole_share_proof(share: int, below: Proof) -> Proof:
    """Build the proof of the whole share from its own fit, although the search closed below it."""
    statement = (
        f"{share}, the whole share of a rank, fits: an update of one micro-batch holds no gradients while it runs. "
        f"With several micro-batches in an update the largest is {below.fits}: {below.statement}"
    )
    return Proof(fits=share, stopped_by="bound", statement=statement)
