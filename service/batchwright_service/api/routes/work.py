"""The routes that tunings and jobs share: list, read, follow, cancel and delete."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.bulk import BulkResponse, BulkSubmission
from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.work import Job, JobPage, PriorityChange, Tuning, TuningPage
from batchwright_service.api.authentication import CurrentCaller, requires_scope
from batchwright_service.api.context import WAKES_WORKERS, Context
from batchwright_service.api.dependencies import (
    CurrentFollower,
    Format,
    IfNoneMatch,
    LastEventId,
    Wait,
    identified_by,
    strict_body,
)
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS
from batchwright_service.api.events.streaming import event_stream, long_poll
from batchwright_service.api.problems import BODY_STATUSES, RETRY_AFTER_HEADER, declared
from batchwright_service.api.reads.coalesced import WorkListQuery
from batchwright_service.api.reads.row_streams import ROW_CONTENT, RowFormat, stream_rows
from batchwright_service.api.responses import DELETED, EVENT_STREAM, json_response, links, on_success
from batchwright_service.api.strict_route import strict_router

SUBMISSION_STATUSES = (*BODY_STATUSES, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
"""Statuses of the problems of every submission."""
_MISSING = declared(HTTPStatus.NOT_FOUND)
_GET_DESCRIPTION = """\
Read a {kind}. With `wait`, the response is sent when the {kind} has ended, or after that many seconds.

With `wait` and `If-None-Match`, the response is sent as soon as the {kind} differs from the named representation by a
new state or {event}. `Retry-After` is present until the {kind} has ended."""

_BULK_DESCRIPTION = """\
Cancel or delete at most 100 {kind}s, all in one transaction, with a result for each.

Each {kind} is changed as by the request for it alone, with the same permissions and the same entry of the audit log.
A refused one does not affect the others: the response has status 200, and each result has its own `status` and
`problem`. A repeated request is harmless: a cancelled {kind} is not changed, and a deleted one is not found."""


@dataclass(frozen=True, kw_only=True)
class WorkRoutes:
    """The routes of one kind of work."""

    kind: WorkKind
    document: type[Tuning | Job]
    page: type[TuningPage | JobPage]
    list_query: Callable[..., Awaitable[WorkListQuery]]
    """A dependency that returns the parameters of a list."""
    read_scope: Scope
    write_scope: Scope
    item_links: tuple[str, ...]
    """Names of the operations that take the identifier of an item of a list."""
    links: tuple[str, ...]
    """Names of the operations that take the identifier of the document."""
    event_nouns: tuple[str, str]
    """Singular and plural noun for the events other than state changes."""
    deletion: str
    """Description of the deletion."""

    @property
    def own_links(self) -> dict[str, Any]:
        """The links from a document to the operations on it."""
        return links(f"{self.kind}_id", "id", *self.links)

    def router(self) -> APIRouter:
        """Return a router without routes, for the path of the collection."""
        collection = f"{self.kind}s"
        return strict_router(collection, f"/v1/{collection}")

    def add_reading(self, router: APIRouter) -> None:
        """Add the routes that list the work and read an item."""
        self._add_list(router)
        self._add_get(router)

    def add_following(self, router: APIRouter) -> None:
        """Add the route that streams events."""

        @router.get(
            self._path("/events"),
            operation_id=self._operation("follow"),
            summary=f"Follow a {self.kind}",
            description=f"Stream the state changes and {self.event_nouns[1]} as server-sent events.",
            dependencies=[requires_scope(self.read_scope)],
            response_class=Response,
            responses=EVENT_STREAM | _MISSING,
        )
        async def follow(
            context: Context,
            follower: CurrentFollower,
            work_id: str = identified_by(self.kind),
            last_event_id: LastEventId = 0,
        ) -> Response:
            followed, _ = await context.reads.work[self.kind].get(work_id)
            return event_stream(followed, follower, last_event_id)

    def add_ending(self, router: APIRouter) -> None:
        """Add the routes that cancel, prioritize and delete."""

        @router.post(
            self._path("/cancel"),
            operation_id=self._operation("cancel"),
            summary=f"Cancel a {self.kind}",
            description=f"Cancel a {self.kind}. Repeating this is harmless: an ended {self.kind} is not changed.",
            dependencies=[requires_scope(self.write_scope), WAKES_WORKERS],
            response_model=self.document,
            responses=on_success(links=self.own_links) | _MISSING,
        )
        def cancel(context: Context, caller: CurrentCaller, work_id: str = identified_by(self.kind)) -> Tuning | Job:
            return context.cases(self.kind).cancel(work_id, caller)

        @router.post(
            self._path("/priority"),
            operation_id=self._operation("prioritize"),
            summary=f"Change the priority of a {self.kind}",
            description=f"Change the priority of a {self.kind} that waits. Any other {self.kind} is not changed.",
            dependencies=[requires_scope(self.write_scope)],
            response_model=self.document,
            responses=on_success(links=self.own_links) | declared(*BODY_STATUSES, HTTPStatus.NOT_FOUND),
        )
        def prioritize(
            change: Annotated[PriorityChange, strict_body(PriorityChange)],
            context: Context,
            caller: CurrentCaller,
            work_id: str = identified_by(self.kind),
        ) -> Tuning | Job:
            return context.cases(self.kind).set_priority(work_id, change.priority, caller)

        @router.delete(
            self._path(),
            operation_id=self._operation("delete"),
            summary=f"Delete a {self.kind}",
            description=self.deletion,
            dependencies=[requires_scope(self.write_scope)],
            status_code=HTTPStatus.NO_CONTENT,
            responses=DELETED | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
        )
        def delete(context: Context, caller: CurrentCaller, work_id: str = identified_by(self.kind)) -> None:
            context.cases(self.kind).delete(work_id, caller)

    def _add_list(self, router: APIRouter) -> None:
        query_parameters = Depends(self.list_query)

        @router.get(
            "",
            operation_id=f"{self._operation('list')}s",
            summary=f"List {self.kind}s",
            description=f"List the {self.kind}s that match every filter, newest first, in pages.",
            dependencies=[requires_scope(self.read_scope)],
            response_model=self.page,
            responses=on_success(
                links=links(f"{self.kind}_id", "items/0/id", *self.item_links),
                content=ROW_CONTENT,
            )
            | declared(HTTPStatus.BAD_REQUEST),
        )
        async def list_work(
            context: Context, query: WorkListQuery = query_parameters, form: Format = RowFormat.JSON
        ) -> Response:
            if form is not RowFormat.JSON:
                rows = partial(context.cases(self.kind).rows, wanted=query.filters)
                return await stream_rows(rows, query.cursor, form, f"{self.kind}s")
            return json_response(await context.reads.pages[self.kind].get(query))

    def _add_get(self, router: APIRouter) -> None:
        @router.get(
            self._path(),
            operation_id=self._operation("get"),
            summary=f"Read a {self.kind}",
            description=_GET_DESCRIPTION.format(kind=self.kind, event=self.event_nouns[0]),
            dependencies=[requires_scope(self.read_scope)],
            response_model=self.document,
            responses=on_success(
                headers=TAG_HEADERS | RETRY_AFTER_HEADER,
                links=self.own_links | RECOMMENDATION_LINK,
            )
            | NOT_MODIFIED
            | _MISSING,
        )
        async def get(
            context: Context,
            follower: CurrentFollower,
            work_id: str = identified_by(self.kind),
            wait: Wait = 0.0,
            if_none_match: IfNoneMatch = None,
        ) -> Response:
            read = partial(context.reads.work[self.kind].get, work_id)
            return await long_poll(read, follower, wait, if_none_match)

    def add_bulk(self, router: APIRouter) -> None:
        """Add the route that cancels or deletes several pieces of work."""

        @router.post(
            "/bulk",
            operation_id=f"{self._operation('change')}s",
            summary=f"Cancel or delete several {self.kind}s",
            description=_BULK_DESCRIPTION.format(kind=self.kind),
            dependencies=[requires_scope(self.write_scope), WAKES_WORKERS],
            responses=declared(*BODY_STATUSES),
        )
        def change_all(
            submission: Annotated[BulkSubmission, strict_body(BulkSubmission)],
            context: Context,
            caller: CurrentCaller,
        ) -> BulkResponse:
            return context.cases(self.kind).change_all(submission, caller)

    def _path(self, rest: str = "") -> str:
        return f"/{{{self.kind}_id}}{rest}"

    def _operation(self, verb: str) -> str:
        return f"{verb}{self.kind.capitalize()}"


RECOMMENDATION_LINK = links("recommendation_id", "recommendation_id", "getRecommendation")
"""The link from a tuning or job to its recommendation."""
