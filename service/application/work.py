"""The use cases that tunings and jobs share: submit, read, list, cancel and delete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from pydantic_core import PydanticSerializationError

from service.application import views
from service.application.context import ApplicationContext
from service.application.rules.idempotency import Submitted, first_time
from service.domain.api_keys import Caller, Scope
from service.domain.states import WorkKind
from service.domain.work import Job, JobSubmission, QueuePosition, Tuning, TuningSubmission
from service.errors import InvalidInputError, NotFoundError, NotOwnerError, ScopeMissingError
from service.fast_path.queue_positions import QueuePositions
from service.store.models import EVERYTHING, Idempotency, NewWork, WorkFilter, WorkItem
from tuner.schemas.base import Document
from tuner.schemas.workload import PythonModel, TransformersModel, WorkloadSpec

SubmissionT = TypeVar("SubmissionT", TuningSubmission, JobSubmission)
WorkT = TypeVar("WorkT", Tuning, Job)


class WorkCases(ABC, Generic[SubmissionT, WorkT]):
    """What callers can do with work of one kind. Safe to share between threads.

    Args:
        context: the shared dependencies.
        places: the places in the queue, of all kinds of work.
    """

    kind: ClassVar[WorkKind]

    def __init__(self, context: ApplicationContext, places: QueuePositions) -> None:
        self._context = context
        self._store = context.store
        self._places = places

    def submit(self, submission: SubmissionT, caller: Caller, once: Idempotency | None = None) -> Submitted:
        """Queue work, or return the stored answer. With ``once``, repeat the first answer to the same request.

        Raises:
            IdempotencyKeyReusedError, IdempotencyKeyInFlightError: when the key's first request was another one, or is
                being answered.
            ScopeMissingError: when the caller may not ask for that priority.
            RequestError: when it cannot be run here; the message says why.
            QuotaExceededError: when the caller's key has used its quota.
        """

        def answer() -> Submitted:
            check_priority(submission.priority, caller)
            return self._submit(submission, caller, once)

        return self._context.once.answer(once, answer)

    def get(self, work_id: str) -> WorkT:
        """The work with this id.

        Raises:
            NotFoundError: when there is none of this kind.
        """
        item = self._item(work_id)
        return self._view(item, self._places.of(item.id, item.state))

    def page(self, limit: int, cursor: str | None = None, wanted: WorkFilter = EVERYTHING) -> bytes:
        """A page, newest first: a ``TuningPage`` or ``JobPage`` as JSON, a tenth of the cost of making the documents.

        Raises:
            InvalidCursorError: when the cursor is not one of this list.
        """
        before = views.decode_cursor(cursor, views.PREFIXES[self.kind])
        rows = self._store.work.newest(self.kind, limit + 1, before, wanted)
        return views.work_page(rows[:limit], views.cursor_after(rows, limit))

    def cancel(self, work_id: str, caller: Caller) -> WorkT:
        """End work; ended work stays unchanged.

        Raises:
            NotFoundError: when there is none of this kind.
            NotOwnerError: when another key made it.
        """
        self._own(work_id, caller, "cancel")
        item = self._store.submissions.cancel(work_id)
        self._context.notify()
        return self._view(item)

    def delete(self, work_id: str, caller: Caller) -> None:
        """Delete work that has ended, with all that was recorded of it. The recommendation of a tuning stays.

        Its files go first: when this is interrupted, the row is there to delete the rest with.

        Raises:
            NotFoundError: when there is none of this kind.
            NotOwnerError: when another key made it.
            NotEndedError: when it has not ended.
            ConflictError: when its files cannot be removed.
        """
        if self._own(work_id, caller, "delete").state.terminal:
            self._remove_files(work_id)
        self._store.retention.delete(work_id)

    @abstractmethod
    def _submit(self, submission: SubmissionT, caller: Caller, once: Idempotency | None) -> Submitted:
        """Queue work, or return the stored answer; the caller's priority has been checked."""

    @abstractmethod
    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> WorkT:
        """The document of stored work."""

    def _remove_files(self, work_id: str) -> None:
        """Remove the files that ended work left on this host; a tuning leaves none."""

    def _queue(self, work: NewWork, once: Idempotency | None) -> Submitted:
        item = self._store.submissions.add(work, self._context.policy.quota, first_time(once, self._queued))
        self._context.notify()
        return self._queued(item)

    def _queued(self, item: WorkItem) -> Submitted:
        return Submitted(item.id, self._view(item).model_dump_json())

    def _item(self, work_id: str) -> WorkItem:
        item = self._store.work.get(work_id) if views.is_identifier(work_id) else None
        if item is None or item.kind is not self.kind:
            raise NotFoundError.of(self.kind, work_id)
        return item

    def _own(self, work_id: str, caller: Caller, verb: str) -> WorkItem:
        """The work with this id, if the caller may change it; ``verb`` names the change in the refusal."""
        item = self._item(work_id)
        if not caller.may_change(item.key_id):
            raise NotOwnerError(
                f"{work_id!r} was not made with this API key: only that key, or one with the scope admin, can {verb} it"
            )
        return item


def check_priority(priority: int, caller: Caller) -> None:
    """Refuse to let a caller go before others who may not.

    Raises:
        ScopeMissingError: naming the priority and the scope.
    """
    if priority > 0 and not caller.may(Scope.ADMIN):
        raise ScopeMissingError(f"priority {priority}: above 0 needs the scope {Scope.ADMIN}; send at most 0")


def model_name(spec: WorkloadSpec) -> str:
    """A short name for lists: the architecture, the `model_type` or the target."""
    model = spec.model
    if isinstance(model, TransformersModel):
        return str(model.config["model_type"])
    return model.target if isinstance(model, PythonModel) else model.architecture.name


def payload(document: Document) -> str:
    """A request as it is stored.

    Raises:
        InvalidInputError: when a free part of it holds text that cannot be written (half a surrogate pair).
    """
    try:
        return document.model_dump_json()
    except PydanticSerializationError as error:
        raise InvalidInputError(f"the request cannot be stored: {error}") from None
