"""Warnings that only the tuning of a command has: of its counted updates, and of what probes wrote. No torch."""

from collections.abc import Sequence

from batchwright.planning.accumulation import uniform_plan
from batchwright.planning.finished_tuning import FinishedTuning
from batchwright.schemas.recommendation import Advice
from batchwright.schemas.results import CountedUpdates, Outcome, ProbeResult, WrittenFiles

_WORTH_ANOTHER_BATCH = 2
"""Times by which the micro-batches of another effective batch must be larger for it to be named."""


def command_warnings(finished: FinishedTuning) -> list[Advice]:
    """Warn of what the probes of a command leave open; no warnings for a workload that is described."""
    if finished.request.command is None:
        return []
    fit = finished.plan_proof.fit if finished.plan_proof is not None else None
    counted = [] if fit is None or fit.counted is None else _warnings_of_counts(fit.counted, finished)
    return [*_few_divisors(finished), *counted, *_warnings_of_files(finished.probes)]


def _few_divisors(finished: FinishedTuning) -> list[Advice]:
    """Name nearby effective batches that a command could take in far fewer micro-batches, as it repeats one size."""
    request, size = finished.request, finished.size
    if not size or finished.conditions.objective.times_plans:
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
        f"A program repeats one micro-batch size, so only divisors of the {finished.share} samples of a rank "
        f"can be used, and {size} is the largest that fits. Effective batches nearby divide better: {plans}, "
        f"{known}, with {near[0].gradient_accumulation_steps} instead of {finished.share // size} backward "
        "passes per update."
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
    room = max(0, finished.conditions.probe_limit_bytes - most)
    expected = high + int(room / per_sample) if per_sample > 0 else high
    bounds = [bound for bound in (proof.next_size and proof.next_size - 1, request.max_micro_batch_size) if bound]
    return max(proof.fits, min([expected, finished.share, *bounds]))


def _warnings_of_counts(counted: CountedUpdates, finished: FinishedTuning) -> list[Advice]:
    """Warn of what the counted updates of the plan leave open."""
    found = []
    if counted.as_planned is None:
        message = (
            f"It was not verified that an update has the plan's number of samples: {counted.statement}. Say "
            "what a sample is with `--samples-dimension`, `--samples-per-unit` or `--no-count-samples`."
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
            f"The sizes of samples vary: {'; '.join(varying)} in {len(seen)} updates with {sum(seen)} "
            "backward passes in all. A later batch may be larger and take more memory. Pad to the largest "
            "size, select the largest samples in probes (`--probe-argument`), or watch more updates "
            "(`--probe-updates`)."
        )
        found.append(Advice(code="sizes-vary", message=message))
    if counted.batch_norms and finished.size < finished.share:
        message = (
            "The program trains with batch norms. Their statistics are per micro-batch, so an update of "
            "several differs from one of the whole batch, regardless of loss scaling. If that matters, use "
            "GroupNorm or LayerNorm, or freeze the statistics. A command is not checked for other couplings "
            "between samples."
        )
        found.append(Advice(code="batch-coupled-modules", message=message))
    return found


def _warnings_of_files(probes: Sequence[ProbeResult]) -> list[Advice]:
    """Name the files that probes of a command wrote outside of their folders."""
    files = WrittenFiles.of_all([probe.files for probe in probes if probe.files is not None])
    if not files.counts:
        return []
    message = (
        f"The probes wrote outside of their own folders: they {files.in_words}. Before you train, remove "
        "checkpoints among them, from which a program that resumes would go on. Have the command write to "
        "`{output_dir}`, or turn writing off in probes with an argument or a variable (`--probe-argument`, "
        "`--probe-env`)."
    )
    return [Advice(code="files-written", message=message)]
