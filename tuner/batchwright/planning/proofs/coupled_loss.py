"""Losses that couple the samples of a batch: the check that a tuning needs. Pure, no torch.

Such a loss has another gradient in several micro-batches than in one. With the whole batch in one micro-batch on one
rank there is nothing to accumulate. Unless the request allows inexact plans, only that plan is probed
(``batchwright.planning.stages.undivided_batch``).
"""

from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo

_LONGEST_SECONDS = 60.0
"""Time limit of the check: a workload that takes longer is tuned without the check."""
_CPU_SHARE = 0.25
"""Share of the host's memory that the check may take on the CPU even where a run may take less: it runs in fp64."""


def coupling_request(
    request: TuningRequest, device: DeviceInfo, share: int, limit_bytes: int
) -> CouplingRequest | None:
    """The check that a tuning needs; none where an update is one sample of one rank.

    Args:
        request: the tuning.
        device: the device to probe.
        share: samples of a rank in an update.
        limit_bytes: memory that a run may take.
    """
    if share == 1 and request.spec.parallelism.world_size == 1:
        return None
    least = int(device.total_bytes * _CPU_SHARE) if device.traits.counts_host_memory else 0
    return CouplingRequest(
        spec=request.spec,
        device=device.id,
        limit_bytes=max(limit_bytes, least),
        timeout_seconds=min(request.probe_timeout_seconds, _LONGEST_SECONDS),
    )


def is_undivided(request: TuningRequest, check: CouplingCheck | None) -> bool:
    """Return whether the plan must be a single micro-batch: the loss couples samples and no other plan is allowed."""
    return check is not None and check.verdict == "coupled" and not request.allow_batch_coupling
