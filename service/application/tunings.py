"""Tunings and the recommendations that they end with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from service.application import views
from service.application.rules.idempotency import Submitted, first_time
from service.application.rules.warm_start import find_earlier
from service.application.work import WorkCases, model_name, payload
from service.domain.api_keys import Caller
from service.domain.states import WorkKind
from service.domain.work import ProbeList, QueuePosition, Tuning, TuningSubmission
from service.domain.workers import ServedDevice
from service.errors import NotFoundError
from service.observability.tracing import current_trace_parent
from service.store.models import Idempotency, NewWork, RecommendationFilter, WorkItem
from tuner.planning.session import Tuning as TuningCourse
from tuner.schemas.requests import TuningRequest


class TuningCases(WorkCases[TuningSubmission, Tuning]):
    """What callers can do with tunings. Safe to share between threads.

    Submitting one finds the tuning with the same fingerprint that has its answer. An answer to the same question under
    other versions or another limit is never served: it leads the new tuning.
    """

    kind = WorkKind.TUNING

    def probes(self, tuning_id: str) -> ProbeList:
        """The evidence of a tuning so far.

        Raises:
            NotFoundError: when there is no such tuning.
        """
        self._item(tuning_id)
        return ProbeList(items=tuple(self._store.evidence.probes(tuning_id)))

    # --- recommendations ---

    def recommendation_texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Recommendations as they are stored, each as JSON, by their ids; unknown ones are left out."""
        return self._store.recommendations.texts([name for name in recommendation_ids if views.is_identifier(name)])

    def recommendations(self, wanted: RecommendationFilter, limit: int, cursor: str | None) -> bytes:
        """A page of recommendations, newest first: a ``RecommendationPage`` as JSON.

        Raises:
            InvalidCursorError: when the cursor is not one of this list.
        """
        rows = self._store.recommendations.newest(wanted, limit + 1, views.decode_cursor(cursor, "rec"))
        return views.recommendation_page(rows[:limit], views.cursor_after(rows, limit))

    # --- helpers ---

    def _submit(self, submission: TuningSubmission, caller: Caller, once: Idempotency | None) -> Submitted:
        self._context.policy.check_model(submission.spec)
        seen = self._context.serving(submission.device)
        request = submission.to_request().model_copy(update={"device": seen.served.device.id})
        course = _course(request, seen.served)
        work = replace(self._new(course, seen.served), key_id=caller.key_id, priority=submission.priority)
        if not submission.fresh:
            if (known := self._known(work.fingerprint)) is not None:
                answer = self._answer_from(known, replace(work, priority=0), request, seen.served, once)
                self._context.hit_counter.count(hit=True)
                return answer
            work = replace(work, warm_start_from=find_earlier(self._store.recommendations, course))
        queued = self._queue(work, once)
        if not submission.fresh:
            self._context.hit_counter.count(hit=False)
        return queued

    def _known(self, fingerprint: str) -> Tuning | None:
        """The tuning that has the newest answer with this fingerprint, unless it is deleted just now.

        An answer that ends where a probe could not tell is none: asked again, perhaps with more time, it may be better.
        """
        found = self._store.recommendations.tuning_with(fingerprint)
        with suppress(NotFoundError):
            known = None if found is None else self.get(found)
            answer = None if known is None else known.recommendation
            return None if answer is not None and not answer.evidence.proof.is_conclusive else known
        return None

    def _new(self, course: TuningCourse, served: ServedDevice) -> NewWork:
        return NewWork(
            id=self._context.identifiers.new("tun"),
            kind=WorkKind.TUNING,
            device=course.device.id,
            model=model_name(course.request.spec),
            effective_batch_size=course.request.effective_batch_size,
            fingerprint=course.fingerprint,
            question=course.request_fingerprint,
            payload=payload(course.request),
            hardware=served.hardware,
            trace_parent=current_trace_parent(),
        )

    def _answer_from(
        self, known: Tuning, work: NewWork, request: TuningRequest, served: ServedDevice, once: Idempotency | None
    ) -> Submitted:
        """A stored answer to a question with the same fingerprint.

        The fingerprint leaves out what does not change memory: the data, the learning rate, which of two like GPUs. A
        job is made from its recommendation's own request, so another such part makes a recommendation of its own,
        resting on the same evidence.
        """
        answer = known.recommendation
        if answer is None or _same_question(answer.request, request):
            found = _answered(known)
            if once is not None:
                self._store.submissions.remember(once, found.as_first(once))
            return found
        changes = {"id": self._context.identifiers.new("rec"), "request": request, "device": served.device}
        own = answer.model_copy(update=changes)
        first = first_time(once, lambda item: _answered(views.tuning(item, own)))
        return _answered(views.tuning(self._store.submissions.add_answered(work, own, first), own))

    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> Tuning:
        answer = item.recommendation_id
        return views.tuning(item, self._store.recommendations.get(answer) if answer else None, queue)


def _answered(tuning: Tuning) -> Submitted:
    return Submitted(tuning.id, tuning.model_dump_json(), queued=False)


def _course(request: TuningRequest, served: ServedDevice) -> TuningCourse:
    return TuningCourse(request, served.device, environment=served.environment, versions=served.versions)


def _same_question(one: TuningRequest, other: TuningRequest) -> bool:
    """Whether two requests ask the same, how long a probe may take aside."""
    aside = {"probe_timeout_seconds"}
    return one.model_dump(exclude=aside) == other.model_dump(exclude=aside)
