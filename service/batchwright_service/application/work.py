"""The use cases that tunings and jobs share: submit, read, list, cancel and delete."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, assert_never

from pydantic_core import PydanticSerializationError

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.bulk import BulkAction, BulkResponse, BulkResult, BulkSubmission
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Job, JobSubmission, QueuePosition, Tuning, TuningSubmission
from batchwright.schemas.base import Document
from batchwright.schemas.command import CommandModel, CommandSpec
from batchwright.schemas.workload import (
    LONGEST_MODEL_NAME,
    PythonModel,
    ReferenceModel,
    TransformersModel,
    WorkloadSpec,
)
from batchwright_service.application import views
from batchwright_service.application.application_context import ApplicationContext
from batchwright_service.application.rules.idempotency import SubmissionResponse
from batchwright_service.domain.callers import Caller
from batchwright_service.errors import (
    ConflictError,
    InvalidInputError,
    NotEndedError,
    NotFoundError,
    NotOwnerError,
    ScopeMissingError,
    ServiceError,
)
from batchwright_service.fast_path.queue_positions import QueuePositions
from batchwright_service.problem_mapping import problem_of
from batchwright_service.store.models import (
    EVERYTHING,
    Idempotency,
    NewWork,
    StoredRequest,
    WorkFilter,
    WorkHead,
    WorkItem,
    WorkRow,
)

SubmissionT = TypeVar("SubmissionT", TuningSubmission, JobSubmission)
WorkT = TypeVar("WorkT", Tuning, Job)


class WorkCases(ABC, Generic[SubmissionT, WorkT]):
    """Use cases of work of one kind. Safe to share between threads."""

    kind: ClassVar[WorkKind]

    def __init__(self, context: ApplicationContext, positions: QueuePositions) -> None:
        self._context = context
        self._store = context.store
        self._positions = positions

    def submit(
        self, submission: SubmissionT, caller: Caller, idempotency: Idempotency | None = None
    ) -> SubmissionResponse:
        """Queue work, or serve a stored recommendation. With ``idempotency``, a retry gets the same work, as it is now.

        Raises:
            IdempotencyKeyReusedError: when the idempotency key belongs to another request.
            IdempotencyKeyInFlightError: when a request with the idempotency key is in progress.
            NotFoundError: when the work that an earlier request with the idempotency key got was deleted.
            ScopeMissingError: when the caller lacks the scope for the priority.
            RequestError: when the work cannot be run here; the message has the reason.
            QuotaExceededError: when the caller's key has used its quota.
        """

        def respond() -> SubmissionResponse:
            _check_priority(submission.priority, caller)
            return self._submit(submission, caller, idempotency)

        return self._respond(idempotency, respond)

    def _respond(
        self, idempotency: Idempotency | None, respond: Callable[[], SubmissionResponse]
    ) -> SubmissionResponse:
        """Return the response of ``respond``; to a retry, the work of the first request in its present state."""
        return self._context.idempotent_requests.respond(idempotency, respond, self._replay)

    def _replay(self, first: StoredRequest) -> SubmissionResponse:
        try:
            item = self._item(first.work_id)
        except NotFoundError:
            raise NotFoundError(
                f"{first.work_id}, created by an earlier request with this Idempotency-Key, was deleted; use "
                "a new key to submit it again"
            ) from None
        queued = first.status == HTTPStatus.ACCEPTED
        return SubmissionResponse(item.id, self._view(item).model_dump_json(), queued=queued, replayed=True)

    def get(self, work_id: str) -> WorkT:
        """Return the work with this id.

        Raises:
            NotFoundError: when no work of this kind has the id.
        """
        item = self._item(work_id)
        return self._view(item, self._positions.of(item.id, item.state))

    def page(
        self, limit: int, cursor: str | None = None, wanted: WorkFilter = EVERYTHING, *, total: bool = False
    ) -> bytes:
        """Return ``rows`` as a ``TuningPage`` or ``JobPage`` in JSON: a tenth of the cost of building the documents."""
        rows = self.rows(limit, cursor, wanted)
        return views.work_page(*rows, self._store.work.count(self.kind, wanted) if total else None)

    def rows(
        self, limit: int, cursor: str | None = None, wanted: WorkFilter = EVERYTHING
    ) -> tuple[list[WorkRow], str | None]:
        """Return the rows of a page, and the cursor of the next one.

        Raises:
            InvalidCursorError: when the cursor does not belong to this list.
        """
        before, search = views.position_after(cursor, views.PREFIXES[self.kind], wanted.search)
        rows = self._store.work.newest(self.kind, limit + 1, before, replace(wanted, search=search))
        return rows[:limit], views.cursor_after(rows, limit, search)

    def cancel(self, work_id: str, caller: Caller) -> WorkT:
        """Cancel work; ended work stays unchanged.

        Raises:
            NotFoundError: when no work of this kind has the id.
            NotOwnerError: when another key submitted it.
        """
        self._item_to_change(work_id, caller, "cancel")
        return self._view(self._store.submissions.cancel(work_id, caller))

    def set_priority(self, work_id: str, priority: int, caller: Caller) -> WorkT:
        """Change the priority of waiting work; other work stays unchanged.

        Raises:
            NotFoundError: when no work of this kind has the id.
            NotOwnerError: when another key submitted it.
            ScopeMissingError: when the caller lacks the scope for the priority.
        """
        _check_priority(priority, caller)
        self._item_to_change(work_id, caller, "prioritize")
        return self._view(self._store.submissions.set_priority(work_id, priority, caller))

    def delete(self, work_id: str, caller: Caller) -> None:
        """Delete work that has ended, with its records and files. The recommendation of a tuning stays.

        Files are removed before the row, so that a repeated call completes an interrupted one.

        Raises:
            NotFoundError: when no work of this kind has the id.
            NotOwnerError: when another key submitted it.
            NotEndedError: when it has not ended.
            ConflictError: when its files cannot be removed.
        """
        if self._item_to_change(work_id, caller, "delete").state.terminal:
            self._remove_files(work_id)
        self._store.retention.delete(work_id, caller)

    def change_all(self, submission: BulkSubmission, caller: Caller) -> BulkResponse:
        """Cancel or delete several pieces of work in one transaction, each as ``cancel`` or ``delete`` would alone.

        An error of one of them is its result, and does not affect the others.
        """
        ids = tuple(dict.fromkeys(submission.ids))
        heads = self._store.work.heads([name for name in ids if views.is_identifier(name)])
        results = {name: self._refusal(name, heads.get(name), caller, submission.action) for name in ids}
        allowed = [heads[name] for name, refused in results.items() if refused is None]
        act = self._cancel_all if submission.action is BulkAction.CANCEL else self._delete_all
        results |= act(allowed, caller)
        return BulkResponse(items=tuple(result for result in results.values() if result is not None))

    @abstractmethod
    def _submit(self, submission: SubmissionT, caller: Caller, idempotency: Idempotency | None) -> SubmissionResponse:
        """Queue work, or serve the stored recommendation; the priority has been checked."""

    @abstractmethod
    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> WorkT:
        """Return the document of stored work."""

    def _cancel_all(self, heads: Sequence[WorkHead], caller: Caller) -> dict[str, BulkResult]:
        states = self._store.submissions.cancel_all([head.id for head in heads], caller)
        return {
            head.id: BulkResult(id=head.id, status=HTTPStatus.OK, state=states[head.id])
            if head.id in states
            else _refused(head.id, NotFoundError.of(self.kind, head.id))
            for head in heads
        }

    def _delete_all(self, heads: Sequence[WorkHead], caller: Caller) -> dict[str, BulkResult]:
        results: dict[str, BulkResult] = {}
        for head in heads:
            try:
                if head.state.terminal:
                    self._remove_files(head.id)
            except ConflictError as error:
                results[head.id] = _refused(head.id, error)
        removed = [head.id for head in heads if head.id not in results]
        states = self._store.retention.delete_all(removed, caller)
        return results | {name: self._deleted(name, states) for name in removed}

    def _deleted(self, work_id: str, states: Mapping[str, State | None]) -> BulkResult:
        if work_id not in states:
            return _refused(work_id, NotFoundError.of(self.kind, work_id))
        state = states[work_id]
        if state is not None:
            return _refused(work_id, NotEndedError.of(work_id, state))
        return BulkResult(id=work_id, status=HTTPStatus.NO_CONTENT)

    def _refusal(self, work_id: str, head: WorkHead | None, caller: Caller, action: BulkAction) -> BulkResult | None:
        """Return the result for work that the caller may not change, and None for other work."""
        if head is None or head.kind is not self.kind:
            return _refused(work_id, NotFoundError.of(self.kind, work_id))
        try:
            _check_owner(head, caller, action)
        except NotOwnerError as error:
            return _refused(work_id, error)
        return None

    def _remove_files(self, work_id: str) -> None:
        """Remove the files of ended work on this host; a tuning has none."""

    def _queue(self, work: NewWork, idempotency: Idempotency | None) -> SubmissionResponse:
        item = self._store.submissions.add(work, self._context.policy.quota, idempotency)
        return SubmissionResponse(item.id, self._view(item).model_dump_json())

    def _item(self, work_id: str) -> WorkItem:
        item = self._store.work.get(work_id) if views.is_identifier(work_id) else None
        if item is None or item.kind is not self.kind:
            raise NotFoundError.of(self.kind, work_id)
        return item

    def _item_to_change(self, work_id: str, caller: Caller, verb: str) -> WorkItem:
        """Return the work with this id, if the caller may change it; ``verb`` names the change in the error."""
        item = self._item(work_id)
        _check_owner(item, caller, verb)
        return item


def _check_owner(work: WorkItem | WorkHead, caller: Caller, verb: str) -> None:
    """Refuse a caller that may not change the work; ``verb`` names the change."""
    if not caller.may_change(work.key_id):
        raise NotOwnerError(
            f"{work.id!r} belongs to another API key: only that key, or one with the scope admin, can {verb} it"
        )


def _check_priority(priority: int, caller: Caller) -> None:
    """Refuse a raised priority without the scope `admin`."""
    if priority > 0 and not caller.may(Scope.ADMIN):
        raise ScopeMissingError(f"priority {priority}: above 0 needs the scope {Scope.ADMIN}; send at most 0")


def _refused(work_id: str, error: ServiceError) -> BulkResult:
    problem = problem_of(error)
    return BulkResult(id=work_id, status=error.status, problem=problem)


def model_name(spec: WorkloadSpec | CommandSpec) -> str:
    """Return a short name for lists: the architecture, the type or the hub's name, the target or the command."""
    model = spec.model
    match model:
        case CommandModel():
            return model.name or Path(model.argv[0]).name[:LONGEST_MODEL_NAME]
        case TransformersModel():
            return model.hub_model.id if model.hub_model else model.model_type
        case PythonModel():
            return model.target
        case ReferenceModel():
            return model.architecture.name
        case _:
            assert_never(model)


def payload(document: Document) -> str:
    """Return a request as it is stored.

    Raises:
        InvalidInputError: when it has text that cannot be encoded (half a surrogate pair).
    """
    try:
        return document.model_dump_json()
    except PydanticSerializationError as error:
        raise InvalidInputError(f"the request cannot be stored: {error}") from None
