"""Mark recommendations whose conditions have changed, and make the submissions that confirm them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cachetools import TTLCache, cached

from batchwright.client.documents.staleness import Staleness
from batchwright.client.documents.work import TuningSubmission
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import HardwareRequest
from batchwright_service.domain.conditions import Conditions, judge
from batchwright_service.errors import NotConfirmableError
from batchwright_service.store.models import AnnouncedDevice, RecommendationFilter, RecommendationRow, StalenessFilter
from batchwright_service.store.recommendation_queries import RecommendationStore

_CACHE_SECONDS = 1.0
"""Lifetime of the workers' reports: lists are read often, and devices change rarely."""


class StaleRecommendations:
    """Judge recommendations by the live workers. Safe to share between threads."""

    def __init__(self, store: RecommendationStore, live_workers: Callable[[], Sequence[AnnouncedDevice]]) -> None:
        self._store = store
        self._live = cached(TTLCache(1, _CACHE_SECONDS))(
            lambda: tuple(Conditions.of_served(announced.served) for announced in live_workers())
        )
        self._lock = threading.Lock()
        self._reported: tuple[Conditions, ...] = ()
        self._judged: dict[str, Staleness] = {}

    def marked(self, rows: Sequence[RecommendationRow]) -> list[RecommendationRow]:
        """Return the rows with their marks; the workers' reports are at most a second old."""
        judged = self._judge({row.conditions for row in rows})
        digests = {row.request_digest for row in rows if judged[row.conditions].stale}
        newest: dict[str, RecommendationRow] = {}
        if digests:
            fresh = _texts(self._judge(self._store.conditions()), stale=False)
            newest = self._store.newest_of_requests(digests, fresh)
        return [_marked(row, judged, newest) for row in rows]

    def filter(self, wanted: RecommendationFilter, stale: bool | None) -> RecommendationFilter:  # noqa: FBT001 - a field
        """Restrict a filter to the recommendations that are stale, or to those that hold; None does not restrict."""
        if stale is None:
            return wanted
        judged = self._judge(self._store.conditions())
        changed, current = _texts(judged, stale=True), _texts(judged, stale=False)
        return replace(wanted, staleness=StalenessFilter(stale, stale_conditions=changed, current=current))

    def _judge(self, texts: set[str] | Sequence[str]) -> dict[str, Staleness]:
        """Return the judgements of stored conditions, of which there are few: each upgrade adds one per device."""
        with self._lock:
            if (reported := self._live()) != self._reported:
                self._reported, self._judged = reported, {}
            for text in texts:
                if text not in self._judged:
                    self._judged[text] = judge(Conditions.model_validate_json(text), self._reported)
            return {text: self._judged[text] for text in texts}


def confirmation_of(
    stored: Recommendation, alive: Sequence[AnnouncedDevice]
) -> tuple[TuningSubmission, ServedDevice | None]:
    """Return the submission whose tuning confirms a recommendation, and the device that it needs, if it needs one.

    The tuning is for the same request on the same kind of device, without its baseline, whose measurement is another
    probe.

    Raises:
        NotConfirmableError: when no live worker has such a device.
    """
    name = stored.device.name
    served = [announced.served for announced in alive if announced.served.device.name == name]
    if not served:
        others = ", ".join(sorted({announced.served.device.name for announced in alive})) or "none"
        raise NotConfirmableError(f"{stored.id} was made for {name}, which no live worker has; served: {others}")
    changes: dict[str, object] = {"baseline": None}
    wanted = stored.request.hardware
    if wanted is None:
        device = next((one for one in served if one.device.id == stored.device.id), served[0])
        changes["device"] = device.device.id
    else:
        device = None
        changes["hardware"] = HardwareRequest(product=name, devices_per_node=wanted.devices_per_node)
    request = stored.request.model_copy(update=changes)
    return TuningSubmission(**dict(request), **dict(stored.names)), device


def _texts(judged: Mapping[str, Staleness], *, stale: bool) -> tuple[str, ...]:
    """Return the conditions with this judgement."""
    return tuple(text for text, judgement in judged.items() if judgement.stale is stale)


def _marked(
    row: RecommendationRow, judged: Mapping[str, Staleness], newest: Mapping[str, RecommendationRow]
) -> RecommendationRow:
    found = judged[row.conditions]
    later = newest.get(row.request_digest) if found.stale else None
    if later is not None and later.recommended == row.recommended:
        found = found.model_copy(update={"stale": False, "confirmed_by": later.id})
    elif later is not None:
        found = found.model_copy(update={"replaced_by": later.id})
    return row.model_copy(update=dict(found))
