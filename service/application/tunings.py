"""Tunings and the recommendations that they end with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from service.application import views
from service.application.context import ApplicationContext, check_priority, model_name, payload
from service.application.rules.idempotency import Submitted, first_time
from service.application.rules.warm_start import find_earlier
from service.domain.api_keys import Caller
from service.domain.states import WorkKind
from service.domain.work import ProbeList, Tuning, TuningSubmission
from service.domain.workers import ServedDevice
from service.errors import NotFoundError
from service.fast_path.queue_positions import QueuePositions
from service.observability.tracing import current_trace_parent
from service.store.hit_counter import HitCounter
from service.store.models import EVERYTHING, Idempotency, NewWork, RecommendationFilter, WorkFilter, WorkItem
from tuner.planning.session import Tuning as TuningCourse
from tuner.schemas.requests import TuningRequest


class TuningCases:
    """What callers can do with tunings. Safe to share between threads."""

    def __init__(self, context: ApplicationContext, counter: HitCounter, positions: QueuePositions) -> None:
        self._positions = positions
        self._context = context
        self._hit_counter = counter
        self._submissions = context.store.submissions
        self._evidence = context.store.evidence
        self._recommendations = context.store.recommendations

    def submit(self, submission: TuningSubmission, caller: Caller, once: Idempotency | None = None) -> Submitted:
        """Queue a tuning, or find the one with the same fingerprint that has its answer.

        An answer to the same question under other versions or another limit is never served: it warm-starts the search.
        With ``once``, a request that was answered before is given the same answer.

        Raises:
            IdempotencyKeyReusedError, IdempotencyKeyInFlightError: when the key's first request was another one, or is
                being answered.
            ScopeMissingError: when the caller may not ask for that priority.
            TargetNotAllowedError: when its code is not allow-listed.
            UnknownDeviceError: when no live worker serves its device.
            QuotaExceededError: when the caller's key has used its quota.
        """
        return self._context.once.answer(once, lambda: self._submit(submission, caller, once))

    def get(self, tuning_id: str) -> Tuning:
        """One tuning.

        Raises:
            NotFoundError: when there is none with this id.
        """
        return self._view(self._context.get(tuning_id, WorkKind.TUNING))

    def page(self, limit: int, cursor: str | None = None, wanted: WorkFilter = EVERYTHING) -> bytes:
        """A page of tunings, newest first: a ``TuningPage`` as JSON, which costs a tenth of making the documents.

        Raises:
            InvalidCursorError: when the cursor is not one of this list.
        """
        return views.work_page(*self._context.page(WorkKind.TUNING, limit, cursor, wanted))

    def probes(self, tuning_id: str) -> ProbeList:
        """The evidence of a tuning so far.

        Raises:
            NotFoundError: when there is no such tuning.
        """
        self._context.get(tuning_id, WorkKind.TUNING)
        return ProbeList(items=tuple(self._evidence.probes(tuning_id)))

    def cancel(self, tuning_id: str, caller: Caller) -> Tuning:
        """Cancel a tuning; one that has ended stays as it is.

        Raises:
            NotFoundError: when there is no such tuning.
            NotOwnerError: when another key made it.
        """
        return self._view(self._context.cancel(tuning_id, WorkKind.TUNING, caller))

    def delete(self, tuning_id: str, caller: Caller) -> None:
        """Delete a tuning that has ended, with its probes and events. Its recommendation stays.

        Raises:
            NotFoundError: when there is no such tuning.
            NotOwnerError: when another key made it.
            NotEndedError: when it has not ended.
        """
        self._context.delete(tuning_id, WorkKind.TUNING, caller)

    # --- recommendations ---

    def recommendation_texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Recommendations as they are stored, each as JSON, by their ids; unknown ones are left out."""
        return self._recommendations.texts([name for name in recommendation_ids if views.is_identifier(name)])

    def recommendations(self, wanted: RecommendationFilter, limit: int, cursor: str | None) -> bytes:
        """A page of recommendations, newest first: a ``RecommendationPage`` as JSON.

        Raises:
            InvalidCursorError: when the cursor is not one of this list.
        """
        rows = self._recommendations.newest(wanted, limit + 1, views.decode_cursor(cursor, "rec"))
        return views.recommendation_page(rows[:limit], views.cursor_after(rows, limit))

    # --- helpers ---

    def _submit(self, submission: TuningSubmission, caller: Caller, once: Idempotency | None) -> Submitted:
        check_priority(submission.priority, caller)
        self._context.policy.check_model(submission.spec)
        seen = self._context.serving(submission.device)
        request = submission.to_request().model_copy(update={"device": seen.served.device.id})
        course = _course(request, seen.served)
        work = replace(self._new(course, seen.served), key_id=caller.key_id, priority=submission.priority)
        if not submission.fresh:
            if (known := self._known(work.fingerprint)) is not None:
                answer = self._answer_from(known, replace(work, priority=0), request, seen.served, once)
                self._hit_counter.count(hit=True)
                return answer
            work = replace(work, warm_start_from=find_earlier(self._recommendations, course))
        item = self._submissions.add(work, self._context.policy.quota, first_time(once, _queued))
        if not submission.fresh:
            self._hit_counter.count(hit=False)
        self._context.notify()
        return _queued(item)

    def _known(self, fingerprint: str) -> Tuning | None:
        """The tuning that has the newest answer with this fingerprint, unless it is deleted just now.

        An answer that ends where a probe could not tell is none: asked again, perhaps with more time, it may be better.
        """
        found = self._recommendations.tuning_with(fingerprint)
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
            question=course.question,
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
                self._submissions.remember(once, found.as_first(once))
            return found
        changes = {"id": self._context.identifiers.new("rec"), "request": request, "device": served.device}
        own = answer.model_copy(update=changes)
        first = first_time(once, lambda item: _answered(views.tuning(item, own)))
        return _answered(views.tuning(self._submissions.add_answered(work, own, first), own))

    def _view(self, item: WorkItem) -> Tuning:
        answer = item.recommendation_id
        recommendation = self._recommendations.get(answer) if answer else None
        return views.tuning(item, recommendation, self._positions.of(item.id, item.state))


def _queued(item: WorkItem) -> Submitted:
    return Submitted(item.id, views.tuning(item, None).model_dump_json())


def _answered(tuning: Tuning) -> Submitted:
    return Submitted(tuning.id, tuning.model_dump_json(), queued=False)


def _course(request: TuningRequest, served: ServedDevice) -> TuningCourse:
    return TuningCourse(request, served.device, environment=served.environment, versions=served.versions)


def _same_question(one: TuningRequest, other: TuningRequest) -> bool:
    """Whether two requests ask the same, how long a probe may take aside."""
    aside = {"probe_timeout_seconds"}
    return one.model_dump(exclude=aside) == other.model_dump(exclude=aside)
