"""The calls about tunings and recommendations, as coroutines."""

import uuid
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from urllib.parse import quote

from batchwright.client.core import PAGE_SIZE, Core, Resource
from batchwright.client.documents.exports import ExportFormatList
from batchwright.client.documents.staleness import Staleness
from batchwright.client.documents.work import (
    ProbeList,
    RecommendationPage,
    RecommendationSummary,
    RecordedProbe,
    TuningPage,
    TuningSubmission,
    TuningSummary,
)
from batchwright.client.errors import TuningFailedError
from batchwright.client.http_messages import Call, creation_call, path_of
from batchwright.client.resources.work import AsyncWork, search_query
from batchwright.client.sdk_documents import Tuning
from batchwright.exports.base import Export, ExportFormat, ExportOptions
from batchwright.library.recommendation import Recommendation
from batchwright.schemas.requests import Objective, TuningRequest
from batchwright.schemas.workload import Precision

_TUNINGS, _RECOMMENDATIONS, _EXPORTS = "/v1/tunings", "/v1/recommendations", "/v1/exports"


class AsyncTunings(AsyncWork[Tuning, TuningSummary]):
    """Tunings: the search for the largest micro-batch."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, _TUNINGS, Tuning, TuningPage)

    async def submit(  # noqa: PLR0913 - one per field
        self,
        request: TuningRequest,
        *,
        fresh: bool = False,
        priority: int = 0,
        name: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Tuning:
        """Submit a tuning, or return the stored tuning of the same request, unless ``fresh``.

        Retried under one idempotency key when a response is lost, so that only one tuning is created.

        Args:
            request: the workload, the effective batch size and the device.
            fresh: probe again, even if a recommendation is stored.
            priority: work of a higher priority runs first; above 0 needs the scope `admin`.
            name: a name that tells the tuning from others in lists.
            project: the project that it belongs to.
            labels: values by key, by which lists can be filtered; both have the bounds of Kubernetes labels.
            idempotency_key: the caller's own key, for example the id of a scheduler's job: another process that submits
                the same request under this key gets the same tuning. A new key when left out.
        """
        names = {"name": name, "project": project, "labels": dict(labels or {})}
        known = TuningRequest.model_validate(request)  # names in a dictionary would be lost
        submission = TuningSubmission.model_validate({**dict(known), "fresh": fresh, "priority": priority, **names})
        return await self._core.call(Tuning, creation_call(_TUNINGS, submission, idempotency_key))

    async def tune(  # noqa: PLR0913 - one per field
        self,
        request: TuningRequest,
        *,
        timeout_seconds: float | None = None,
        fresh: bool = False,
        priority: int = 0,
        name: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Recommendation:
        """Submit a tuning and wait for its recommendation, which may be that nothing fits (``feasible`` is false).

        ``timeout_seconds`` is how long to wait; the tuning continues after that. The other arguments are those of
        ``submit``.

        Raises:
            TuningFailedError: when the tuning ends without a recommendation; the error carries the problem.
            WaitTimeoutError: when the tuning has not ended in time.
        """
        tuning = await self.submit(
            request,
            fresh=fresh,
            priority=priority,
            name=name,
            project=project,
            labels=labels,
            idempotency_key=idempotency_key,
        )
        if not tuning.state.terminal:
            tuning = await self.wait(tuning.id, timeout_seconds)
        if tuning.recommendation is None:
            raise TuningFailedError(tuning)
        return tuning.recommendation

    async def probes(self, tuning_id: str) -> tuple[RecordedProbe, ...]:
        """List the recorded probes in their order.

        Raises:
            NotFoundError: when there is no such tuning.
        """
        return (await self._core.read(ProbeList, path_of(_TUNINGS, tuning_id, "probes"))).items


_NO_OPTIONS = ExportOptions()


class AsyncRecommendations(Resource):
    """Recommendations: the results of tunings."""

    async def get(self, recommendation_id: str) -> Recommendation:
        """Return a recommendation, with the methods of ``batchwright.Recommendation``.

        Raises:
            NotFoundError: when there is no recommendation with this id.
        """
        return await self._core.read(Recommendation, path_of(_RECOMMENDATIONS, recommendation_id))

    async def staleness(self, recommendation_id: str) -> Staleness:
        """Return what has changed on the device of a recommendation since it was made.

        Raises:
            NotFoundError: when there is no recommendation with this id.
        """
        return await self._core.read(Staleness, path_of(_RECOMMENDATIONS, recommendation_id, "staleness"))

    async def confirm(self, recommendation_id: str) -> Tuning:
        """Submit the tuning that confirms a stale recommendation, by one probe where that is enough.

        Returns the tuning, queued, or ended where such a tuning has ended before.

        Raises:
            NotFoundError: when there is no recommendation with this id.
            ConflictError: when no live worker has its kind of device.
        """
        path = path_of(_RECOMMENDATIONS, recommendation_id, "confirm")
        return await self._core.call(Tuning, Call("POST", path, idempotency_key=str(uuid.uuid4())))

    async def export(
        self,
        recommendation_id: str,
        name: str,
        *,
        target_version: str | None = None,
        options: ExportOptions = _NO_OPTIONS,
    ) -> Export:
        """Have the service export a recommendation as files that a framework or launcher reads.

        The method ``export`` of a recommendation does so on this host, with the installed version of Batchwright.

        Args:
            recommendation_id: a feasible recommendation.
            name: a target that ``formats`` lists, for example `deepspeed` or `slurm`.
            target_version: one of the target's versions; its newest when left out.
            options: facts about the cluster that the recommendation does not contain.

        Raises:
            NotFoundError: when there is no such recommendation, or no such target.
            ConflictError: when nothing fits, or the target cannot reach the effective batch and `allow_inexact` is not
                set.
            ApiError: when the version or an option is invalid.
        """
        return await self._core.call(Export, _export(recommendation_id, (name,), target_version, options))

    async def exported_file(
        self,
        recommendation_id: str,
        name: str,
        file_name: str,
        *,
        target_version: str | None = None,
        options: ExportOptions = _NO_OPTIONS,
    ) -> str:
        """Return the text of one file of an export.

        Raises:
            NotFoundError: when there is no such recommendation, target or file.
            ApiError: as ``export``.
        """
        return await self._core.text(_export(recommendation_id, (name, file_name), target_version, options))

    async def formats(self) -> tuple[ExportFormat, ...]:
        """List the targets of exports: frameworks, then launchers."""
        return (await self._core.call(ExportFormatList, Call("GET", _EXPORTS))).items

    def list(  # noqa: PLR0913 - one per filter
        self,
        *,
        fingerprint: str | None = None,
        device: str | None = None,
        model: str | None = None,
        precision: Precision | None = None,
        objective: Objective | None = None,
        stale: bool | None = None,
        distinct: bool = False,
        search: str | None = None,
        labels: Mapping[str, str] | None = None,
        project: str | None = None,
        owner: str | None = None,
        created_after: datetime | None = None,
        sort: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[RecommendationSummary, None]:
        """Iterate over the matching recommendations, fetched page by page; search and sort as in ``AsyncWork.list``.

        With ``stale``, only those whose torch, driver or hardware has changed since (True), or that still hold (False).
        With ``distinct``, only the newest of each fingerprint, with the number of its ``uses``.
        """
        filters = {"fingerprint": fingerprint, "device": device, "model": model, "limit": page_size}
        filters |= {"precision": precision, "objective": objective}
        filters |= {"stale": None if stale is None else str(stale).lower(), "distinct": "true" if distinct else None}
        filters |= search_query(search, labels, created_after, project=project, owner=owner, sort=sort)
        return self._core.rows(RecommendationPage, Call("GET", _RECOMMENDATIONS, filters))


def _export(recommendation_id: str, names: tuple[str, ...], version: str | None, options: ExportOptions) -> Call:
    query = {"target_version": version, **options.model_dump(exclude_defaults=True)}
    return Call(
        "GET", path_of(_RECOMMENDATIONS, recommendation_id, "exports", *(quote(name, safe="") for name in names)), query
    )
