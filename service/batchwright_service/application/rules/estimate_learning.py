"""The residuals of earlier tunings on such a device, by which the estimates of a tuning are corrected."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.client.documents.workers import ServedDevice
from batchwright.planning.learning.workload_family import family_of
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.residuals import EstimateResidual
from batchwright_service.store.evidence import ResidualStore

_MAX_RESIDUALS = 32
"""Newest residuals of the family, and as many of other families, that a correction takes into account."""


def residuals_for(store: ResidualStore, served: ServedDevice, request: TuningRequest) -> Sequence[EstimateResidual]:
    """Return the residuals that tell of the estimates of a request; none for a command, which has no estimate."""
    if request.command is not None:
        return ()
    return store.newest(served.hardware, family_of(request.workload), _MAX_RESIDUALS)
