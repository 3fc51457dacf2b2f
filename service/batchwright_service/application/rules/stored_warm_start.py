"""Pick a stored recommendation to warm-start a tuning of the same request under other versions or limits."""

import logging
from contextlib import suppress

from batchwright.errors import SpecError, UnreadableDocumentError
from batchwright.planning.tuning_conditions import TuningConditions
from batchwright.planning.warm_start import PossibleWarmStart, warm_start_from
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.errors import NotFoundError
from batchwright_service.store.models import WorkItem
from batchwright_service.store.recommendation_queries import RecommendationStore

_log = logging.getLogger(__name__)

_MAX_CANDIDATES = 8
"""Newest recommendations that are considered, in search of one that a single probe may confirm."""


def find_warm_start(store: RecommendationStore, conditions: TuningConditions) -> str | None:
    """Return the id of the best warm start: the newest that one probe may confirm, else the newest useful one."""
    candidates = store.for_request(conditions.request_fingerprint, _MAX_CANDIDATES)
    starts = [start for stored in candidates if (start := _warm_start(store, conditions, stored)) is not None]
    confirmable = [start for start in starts if start.size is not None]
    return next((start.stored.id for start in [*confirmable, *starts]), None)


def warm_start_of(store: RecommendationStore, item: WorkItem) -> Recommendation | None:
    """Return the recommendation that ``item`` is to be warm-started from, if that is still stored."""
    if item.warm_start_from is None:
        return None
    try:
        return store.get(item.warm_start_from)
    except (NotFoundError, UnreadableDocumentError) as error:
        _log.info("%s is not warm-started by %s: %s", item.id, item.warm_start_from, error)
        return None


def _warm_start(
    store: RecommendationStore, conditions: TuningConditions, stored: Recommendation
) -> PossibleWarmStart | None:
    with suppress(NotFoundError, SpecError, UnreadableDocumentError):
        start = warm_start_from(_measured(store, stored), conditions)
        return start if start.is_useful else None
    return None


def _measured(store: RecommendationStore, stored: Recommendation) -> Recommendation:
    """Return the recommendation whose probes prove ``stored``: itself, or the one that warm-started it.

    Chains are cut when recommendations are made, so that the proof is at most one step away.

    Raises:
        NotFoundError: when that recommendation is not stored any more.
    """
    warm_start = stored.evidence.warm_start
    if stored.evidence.proof.stopped_by != "warm-start" or warm_start is None:
        return stored
    return store.get(warm_start.recommendation_id)
