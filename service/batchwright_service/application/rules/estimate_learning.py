"""Correct estimates by the residuals of earlier tunings on such a device, and keep the residuals of those that end."""

from __future__ import annotations

from batchwright.client.documents.workers import ServedDevice
from batchwright.planning.learning.context import expect_measured_context
from batchwright.planning.learning.correction import conditions_of, corrected
from batchwright.planning.learning.residual import residual_of
from batchwright.planning.session import Tuning
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import ExpectedPeaks
from batchwright_service.store.evidence import ResidualStore

_MAX_RESIDUALS = 32
"""Newest residuals of the family, and as many of other families, that a correction takes into account."""


def expect_context(store: ResidualStore, served: ServedDevice, tuning: Tuning) -> None:
    """Let the estimates of ``tuning`` expect the context that tunings on such a device measured."""
    residuals = store.newest(served.hardware, conditions_of(tuning).family, _MAX_RESIDUALS)
    expect_measured_context(tuning, residuals)


def correct_estimate(store: ResidualStore, served: ServedDevice, tuning: Tuning, peaks: ExpectedPeaks) -> ExpectedPeaks:
    """Return the estimate of ``tuning`` with the correction that the stored residuals give."""
    conditions = conditions_of(tuning)
    return corrected(peaks, store.newest(served.hardware, conditions.family, _MAX_RESIDUALS), conditions)


def keep_residual(store: ResidualStore, served: ServedDevice, tuning_id: str, recommendation: Recommendation) -> None:
    """Store the residual of a tuning that has ended, if an estimate seeded the tuning."""
    residual = residual_of(recommendation, served.hardware)
    if residual is not None:
        store.add(tuning_id, residual)
