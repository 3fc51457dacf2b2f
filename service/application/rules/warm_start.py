"""Which stored answer leads a tuning: one to the same question, under other versions or another limit."""

from __future__ import annotations

import logging
from contextlib import suppress

from service.errors import NotFoundError
from service.store.interface import RecommendationStore
from service.store.models import WorkItem
from tuner.errors import SpecError
from tuner.planning.session import Tuning
from tuner.planning.warm_start import PossibleWarmStart
from tuner.schemas.recommendation import Recommendation

_log = logging.getLogger(__name__)

_LOOKED_AT = 8
"""Answers, from the newest on, among which one is looked for that a single probe may confirm."""


def find_earlier(store: RecommendationStore, tuning: Tuning) -> str | None:
    """Id of the answer that leads ``tuning`` best: one that a probe may confirm, else the newest of any use."""
    leads = [
        led for it in store.for_question(tuning.request_fingerprint, _LOOKED_AT) if (led := _lead(store, tuning, it))
    ]
    confirmable = [it for it in leads if it.size is not None]
    return next((it.stored.id for it in [*confirmable, *leads]), None)


def recall_earlier(store: RecommendationStore, item: WorkItem, tuning: Tuning) -> None:
    """Let the answer that a queued tuning refers to lead it; where that is no more, or asks another question, none."""
    if item.warm_start_from is None:
        return
    try:
        tuning.warm_start_from(store.get(item.warm_start_from))
    except (NotFoundError, SpecError) as error:
        _log.info("%s is not warm-started by %s: %s", item.id, item.warm_start_from, error)


def _lead(store: RecommendationStore, tuning: Tuning, answer: Recommendation) -> PossibleWarmStart | None:
    with suppress(NotFoundError, SpecError):
        start = tuning.possible_warm_start(_fully_proven(store, answer))
        return start if start.is_useful else None
    return None


def _fully_proven(store: RecommendationStore, answer: Recommendation) -> Recommendation:
    """The answer that has measured what ``answer`` rests on: chains are cut, so it is at most one step away.

    Raises:
        NotFoundError: when it is not stored any more.
    """
    rests_on = answer.evidence.warm_start
    if answer.evidence.proof.stopped_by != "warm-start" or rests_on is None:
        return answer
    return store.get(rests_on.recommendation_id)
