"""Warnings of a recommendation: what its evidence leaves open. Pure, no torch."""

from batchwright.planning.finished_tuning import FinishedTuning
from batchwright.planning.warnings.command_warnings import command_warnings
from batchwright.schemas.field_errors import listed
from batchwright.schemas.recommendation import Advice
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult
from batchwright.units import format_bytes

_SHARED_DEVICE_BYTES = 64 * 1024**2
"""Bytes that the driver and a display take of an idle card; more than this is another process."""


def tuning_warnings(finished: FinishedTuning) -> list[Advice]:
    """Warn of what the evidence of a tuning leaves open."""
    probe = finished.deciding_probe
    found = [Advice(code="inconsistent-outcomes", message=note) for note in finished.notes]
    if finished.late_estimate is not None:
        message = f"{finished.late_estimate} This may cost extra probes; the proof is unaffected."
        found.append(Advice(code="search-without-estimate", message=message))
    if probe is not None:
        found += _warnings_of_probe(probe, finished.conditions.device)
    untimed = [each for each in finished.probes if each.measures_time and each.outcome is not Outcome.FIT]
    for each in untimed:
        size, reason = each.micro_batch_size, f"{each.outcome}: {each.message}"
        message = f"The plan with micro-batches of {size} could not be timed and is not chosen ({reason})."
        found.append(Advice(code="plan-not-timed", message=message))
    if finished.plan_proof is not None and finished.plan_proof.inconclusive is not None:
        found.append(Advice(code="plan-not-known-to-fit", message=finished.plan_proof.statement))
    if finished.proof.stopped_by == "invalid-size":
        message = f"Size {finished.proof.next_size} failed for a reason other than memory: see its probe's message."
        found.append(Advice(code="stopped-by-kernel-limit", message=message))
    if finished.proof.stopped_by == "warm-start":
        message = (
            f"Only {finished.proof.fits} was run now, to confirm the warm start's recommendation. That "
            f"{finished.proof.next_size} fails was measured then: tune without a warm start to measure it "
            "again."
        )
        found.append(Advice(code="rests-on-warm-start", message=message))
    if not finished.proof.is_conclusive:
        found.append(Advice(code="larger-sizes-not-known", message=finished.proof.statement))
    found += [_not_estimated(changes) for changes in finished.what_if.not_estimated]
    found += _warnings_of_coupling(finished)
    found += _warnings_of_parallelism(finished)
    return [*found, *command_warnings(finished)]


def _not_estimated(changes: str) -> Advice:
    subject = f"The effect of {changes}" if changes else "The effect of changes of the spec"
    message = f"{subject} could not be estimated: tracing failed or timed out. Tune the changed spec to measure it."
    return Advice(code="what-if-not-estimated", message=message)


def _warnings_of_coupling(finished: FinishedTuning) -> list[Advice]:
    check = finished.coupling
    if check is None or check.verdict == "separate":
        return []
    if check.verdict == "not-compared":
        message = (
            f"It could not be checked whether the loss couples the samples of a batch: {check.message} If it "
            "does, accumulated updates differ from full-batch ones."
        )
        return [Advice(code="coupling-not-checked", message=message)]
    if finished.request.spec.parallelism.world_size == 1 and finished.size == finished.share:
        message = (
            f"{check.message} This plan is exact because its one micro-batch is the whole batch; no other plan is."
        )
        return [Advice(code="coupled-loss", message=message)]
    return [Advice(code="coupled-loss", message=check.message)]


def _warnings_of_probe(probe: ProbeResult, device: DeviceInfo) -> list[Advice]:
    notes = probe.model.config_notes if probe.model is not None else ()
    found = [Advice(code="undeclared-config-fields", message=note) for note in notes]
    if probe.model is not None and probe.model.in_eval_mode:
        message = (
            "The model was passed in eval mode and measured so: without dropout, and with fixed BatchNorm "
            "statistics. If training calls `model.train()`, call it before the tuning too: dropout takes "
            "more memory."
        )
        found.append(Advice(code="model-in-eval-mode", message=message))
    if probe.model is not None and probe.model.batch_coupled_modules:
        message = (
            f"{listed(probe.model.batch_coupled_modules, 3)}: their statistics are per micro-batch, so "
            "accumulated updates differ from full-batch ones, regardless of loss scaling. If that matters, "
            "use GroupNorm or LayerNorm, or freeze the statistics."
        )
        found.append(Advice(code="batch-coupled-modules", message=message))
    if (probe.other_processes_bytes or 0) > _SHARED_DEVICE_BYTES:
        message = (
            f"Other processes held {format_bytes(probe.other_processes_bytes or 0)} of {device.id} during the "
            "probes: the recommendation holds as long as they take no more than that."
        )
        found.append(Advice(code="shared-device", message=message))
    if probe.allocator_retries:
        times = "once" if probe.allocator_retries == 1 else f"{probe.allocator_retries} times"
        message = (
            f"At this size the allocator freed its cache and retried {times} in one update: the size fits, "
            "but runs slowly. The objective `fastest` measures whether a smaller micro-batch is faster."
        )
        found.append(Advice(code="thrashing-fit", message=message))
    return found


def _warnings_of_parallelism(finished: FinishedTuning) -> list[Advice]:
    if finished.request.command is not None or finished.request.spec.parallelism.world_size == 1:
        return []
    found = []
    if (simulated := finished.simulated_ranks) is not None:
        message = (
            f"One rank was probed in a process group of {simulated} whose other ranks did not run. Its shards and "
            "buffers were as large as with all of them."
        )
        found.append(Advice(code="ranks-simulated", message=message))
    if any(probe.ranks for probe in finished.probes):
        return found
    message = (
        "Gradient buckets were held as in a distributed run, but the buffers of the communication library are not in "
        "the measurement (NCCL: 0.5 to 1.6 GB per communicator, outside torch's allocator)."
    )
    found.append(Advice(code="communication-buffers-not-probed", message=message))
    return found
