"""The residual of a tuning: its measurements less the estimate that seeded its search. Pure, no torch."""

from batchwright.planning.learning.workload_family import family_of
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.residuals import EstimateResidual, PeakResidual
from batchwright.schemas.results import Outcome


def residual_of(recommendation: Recommendation, hardware: str) -> EstimateResidual | None:
    """The residual of the tuning that ended with ``recommendation``.

    None where no estimate seeded the search, nothing fits, or no size ran out of memory. Updates of a single
    micro-batch hold no gradients while it runs and lie on another curve, so they are left out.

    Args:
        recommendation: the recommendation.
        hardware: the kind of device, by which residuals are found again.
    """
    evidence, headroom = recommendation.evidence, recommendation.headroom
    expected = evidence.expected if evidence.warm_start is None else None
    probes = [probe for probe in evidence.probes if probe.accumulates and probe.shows_size]
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.used_bytes]
    fit = max(fits, key=lambda probe: probe.micro_batch_size, default=None)
    if expected is None or headroom is None or fit is None:
        return None
    failures = [probe.micro_batch_size for probe in probes if probe.outcome is Outcome.OOM]
    failed = min((size for size in failures if size > fit.micro_batch_size), default=None)
    if failed is None:
        return None
    return EstimateResidual(
        hardware=hardware,
        family=family_of(recommendation.request.workload),
        versions=recommendation.versions,
        limit_bytes=expected.usable_of(fit.limit_bytes)
        or int(headroom.limit_bytes * (1.0 - recommendation.request.memory_margin)),
        zero_expected_bytes=round(expected.used_bytes(0)),
        fit=PeakResidual(
            micro_batch_size=fit.micro_batch_size,
            expected_bytes=round(expected.used_bytes(fit.micro_batch_size)),
            measured_bytes=fit.used_bytes or 1,
        ),
        failed_size=failed,
        failed_expected_bytes=round(expected.used_bytes(failed)),
        context_bytes=fit.context_bytes,
    )
