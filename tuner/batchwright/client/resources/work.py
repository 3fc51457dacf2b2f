"""The calls that tunings and jobs share, as coroutines."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic

from batchwright.client.core import PAGE_SIZE, Core, FollowedT, Resource
from batchwright.client.documents.bulk import MOST_IDS, BulkAction, BulkResult, BulkSubmission
from batchwright.client.documents.states import State, WorkOutcome
from batchwright.client.documents.work import Event, Page, PriorityChange, RowT
from batchwright.client.http_messages import Call, path_of


def search_query(
    search: str | None, labels: Mapping[str, str] | None, created_after: datetime | None, **given: str | None
) -> dict[str, Any]:
    """Return the query parameters of a search; ``given`` are sent as they are."""
    return {
        "q": search,
        "label": [f"{key}={value}" for key, value in (labels or {}).items()] or None,
        "created_after": None if created_after is None else created_after.isoformat(),
        **given,
    }


class AsyncWork(Resource, Generic[FollowedT, RowT]):
    """Calls for work of one kind, with documents of ``FollowedT`` and list rows of ``RowT``."""

    def __init__(self, core: Core, path: str, document: type[FollowedT], page: type[Page[RowT]]) -> None:
        super().__init__(core)
        self._path = path
        self._document: type[FollowedT] = document
        self._page = page

    async def get(self, work_id: str) -> FollowedT:
        """Return the current state of the work.

        Raises:
            NotFoundError: when there is no work with this id.
        """
        return await self._core.read(self._document, path_of(self._path, work_id))

    async def wait(self, work_id: str, timeout_seconds: float | None = None) -> FollowedT:
        """Wait until the work has ended, and return it. Survives restarts of the service.

        Raises:
            WaitTimeoutError: when the work has not ended within ``timeout_seconds``.
            NotFoundError: when there is no work with this id.
        """
        return await self._core.until_ended(self._document, path_of(self._path, work_id), timeout_seconds)

    def events(self, work_id: str, after: int = 0) -> AsyncGenerator[Event, None]:
        """Iterate over the state changes and the probes or updates after event ``after``, as they happen.

        Resumes broken connections, and ends after the last event.

        Raises:
            NotFoundError: when there is no work with this id.
        """
        return self._core.events(path_of(self._path, work_id, "events"), after)

    async def cancel(self, work_id: str) -> FollowedT:
        """Cancel the work. Does nothing if it has ended.

        Raises:
            NotFoundError: when there is no work with this id.
            NotAllowedError: when another API key submitted it.
        """
        call = Call("POST", path_of(self._path, work_id, "cancel"), repeatable=True)
        return await self._core.call(self._document, call)

    async def set_priority(self, work_id: str, priority: int) -> FollowedT:
        """Change the priority of work that waits. Does nothing if it no longer waits.

        Raises:
            NotFoundError: when there is no work with this id.
            NotAllowedError: when another API key submitted it, or for a priority above 0 without the scope `admin`.
        """
        body = PriorityChange(priority=priority)
        call = Call("POST", path_of(self._path, work_id, "priority"), body=body, repeatable=True)
        return await self._core.call(self._document, call)

    async def delete(self, work_id: str) -> None:
        """Delete work that has ended, with its events, and with a tuning's probes or a job's folder.

        The recommendation of a tuning stays.

        Raises:
            NotFoundError: when there is no work with this id.
            ConflictError: when the work has not ended.
            NotAllowedError: when another API key submitted it.
        """
        await self._core.delete(path_of(self._path, work_id))

    async def cancel_all(self, work_ids: Sequence[str]) -> tuple[BulkResult, ...]:
        """Cancel several, and return for each its new state, or the problem because of which it is unchanged.

        The service changes 100 in one transaction. Unknown ones, and those of another API key, are refused one by one.
        """
        return await self._change_all(BulkAction.CANCEL, work_ids)

    async def delete_all(self, work_ids: Sequence[str]) -> tuple[BulkResult, ...]:
        """Delete several that have ended, and return the result for each, as ``cancel_all`` does."""
        return await self._change_all(BulkAction.DELETE, work_ids)

    def list(  # noqa: PLR0913 - one per filter
        self,
        *,
        state: State | Sequence[State] | None = None,
        device: str | None = None,
        model: str | None = None,
        fingerprint: str | None = None,
        search: str | None = None,
        labels: Mapping[str, str] | None = None,
        project: str | None = None,
        owner: str | None = None,
        outcome: WorkOutcome | None = None,
        problem_code: str | None = None,
        created_after: datetime | None = None,
        slot: str | None = None,
        sort: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[RowT, None]:
        """Iterate over the matching work, fetched page by page.

        Args:
            state: one state, or several.
            device: the id of the device.
            model: the short name of the model.
            fingerprint: that of the tuning, or of the job's recommendation.
            search: words that are parts of the name, project, labels, model, device, fingerprint or id.
            labels: labels that must be there with these values.
            project: the project that it belongs to.
            owner: the name or id of the API key that submitted it.
            outcome: how it ended, such as ``"infeasible"`` for tunings that found no plan.
            problem_code: the code of the problem with which it failed.
            created_after: only what was created later.
            slot: the slot (host and device) that runs it, or ran it last.
            sort: the field to sort by, such as ``"name"`` or ``"-samples_per_second"``; the newest come first without.
            page_size: rows of one request.
        """
        filters = {"state": state, "device": device, "model": model, "fingerprint": fingerprint, "limit": page_size}
        given = {"project": project, "owner": owner, "problem_code": problem_code, "slot": slot, "sort": sort}
        filters |= {"outcome": outcome}
        query = filters | search_query(search, labels, created_after, **given)
        return self._core.rows(self._page, Call("GET", self._path, query))

    async def _change_all(self, action: BulkAction, work_ids: Sequence[str]) -> tuple[BulkResult, ...]:
        results: tuple[BulkResult, ...] = ()
        ids = tuple(dict.fromkeys(work_ids))
        for start in range(0, len(ids), MOST_IDS):
            part = ids[start : start + MOST_IDS]
            results += await self._core.change_all(f"{self._path}/bulk", BulkSubmission(action=action, ids=part))
        return results
