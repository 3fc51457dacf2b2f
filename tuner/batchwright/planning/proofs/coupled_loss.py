"""Losses that couple the samples of a batch: the check that a tuning needs, and the only plan that stays exact.

Such a loss has another gradient in several micro-batches than in one. With the whole batch in one micro-batch on one
rank there is nothing to accumulate. Unless the request allows inexact plans, only that plan is probed. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.errors import TuningFailedError
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult

_REASON = "coupled-loss"
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
    least = int(device.total_bytes * _CPU_SHARE) if device.kind == "cpu" else 0
    return CouplingRequest(
        spec=request.spec,
        device=device.id,
        limit_bytes=max(limit_bytes, least),
        timeout_seconds=min(request.probe_timeout_seconds, _LONGEST_SECONDS),
    )


def is_undivided(request: TuningRequest, check: CouplingCheck | None) -> bool:
    """Return whether the plan must be a single micro-batch: the loss couples samples and no other plan is allowed."""
    return check is not None and check.verdict == "coupled" and not request.allow_batch_coupling


class WholeBatch:
    """The only plan of a tuning whose loss couples samples: the whole batch in one micro-batch.

    Args:
        request: the tuning.
        share: samples of a rank in an update.
        check: the check that found the coupling.
    """

    def __init__(self, request: TuningRequest, share: int, check: CouplingCheck) -> None:
        self._ranks = request.spec.parallelism.world_size
        self._share = share
        self._check = check

    def require(self, largest: int) -> None:
        """Refuse a request that excludes the plan of one micro-batch.

        Args:
            largest: the largest micro-batch that is searched.

        Raises:
            TuningFailedError: when several ranks, or several micro-batches, share an update.
        """
        if self._ranks > 1:
            raise self._error(f"An update on {self._ranks} ranks")
        if largest < self._share:
            raise self._error(f"An update of {self._share} samples in micro-batches of at most {largest}")

    def failed(self, probes: Sequence[ProbeResult]) -> ProbeResult | None:
        """The probe that did not fit the whole batch, if there is one."""
        stopped = (Outcome.OOM, Outcome.INVALID_SIZE)
        of_whole_batch = (probe for probe in probes if probe.micro_batch_size == self._share)
        return next((probe for probe in of_whole_batch if probe.outcome in stopped), None)

    def require_fit(self, probes: Sequence[ProbeResult]) -> None:
        """Refuse a tuning whose whole batch did not fit.

        Raises:
            TuningFailedError: when the whole batch did not fit.
        """
        failed = self.failed(probes)
        if failed is not None:
            raise self._error(f"{self._share} samples do not fit in one micro-batch ({failed.message}), and several")

    def _error(self, plan: str) -> TuningFailedError:
        remedy = "To plan and train nevertheless, set allow_batch_coupling (--allow-batch-coupling)."
        return TuningFailedError(_REASON, f"{self._check.message} {plan} would not be exact. {remedy}")
