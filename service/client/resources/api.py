"""Every call of the API, grouped as the API groups them: ``AsyncClient`` has them, ``Client`` makes them blocking."""

from __future__ import annotations

from collections.abc import Sequence

from service.client.core import Core, Resource
from service.client.protocol import Call, DocumentT, path_of
from service.client.resources.jobs import AsyncJobs
from service.client.resources.tunings import AsyncRecommendations, AsyncTunings
from service.domain.api_keys import ApiKey, CreatedKey, KeyList, KeySubmission, Scope
from service.domain.work import GpuList
from service.domain.workers import DeviceList, DeviceStatus, Health, Period, Queue, QueueEntry, Summary
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.gpus import Gpu

_KEYS = "/v1/keys"
_LONGEST_QUEUE_SECONDS = 15.0
"""What the service may let an estimate wait for its turn, and some more."""


class AsyncDevices(Resource):
    """The devices of the service."""

    async def list(self) -> tuple[DeviceStatus, ...]:
        """The devices, and who holds each."""
        return (await self._core.read(DeviceList, "/v1/devices")).items


class AsyncQueue(Resource):
    """What waits."""

    async def list(self, limit: int | None = None) -> tuple[QueueEntry, ...]:
        """Tunings and jobs that wait, in the order in which they are taken, and for how long yet."""
        return (await self._core.call(Queue, Call("GET", "/v1/queue", {"limit": limit}))).items


class AsyncEstimates(Resource):
    """Estimates: what would fit on GPUs that need not be there."""

    async def create(self, request: EstimateRequest) -> Estimate:
        """What the workload would take. Comes when it is done: the request's own time limit counts.

        Raises:
            ApiError: when the service refuses it, cannot trace it, or stays busy with others (`estimates-busy`).
        """
        call = Call("POST", "/v1/estimates", body=request, repeatable=True)
        return await self._core.call(Estimate, call, request.timeout_seconds + _LONGEST_QUEUE_SECONDS)


class AsyncGpus(Resource):
    """The GPUs that estimates know."""

    async def list(self) -> tuple[Gpu, ...]:
        """The catalogue, with the source of every figure."""
        return (await self._core.read(GpuList, "/v1/gpus")).items


class AsyncKeys(Resource):
    """API keys; for callers with the scope `admin`."""

    async def create(
        self, name: str, scopes: Sequence[Scope | str], expires_in_days: float | None = None
    ) -> CreatedKey:
        """Make a key: ``key`` of the answer is its text, which is not shown again. Never sent twice.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when no answer came: a key that nobody knows may have been made.
        """
        given = KeySubmission(
            name=name, scopes=tuple(Scope(scope) for scope in scopes), expires_in_days=expires_in_days
        )
        return await self._core.call(CreatedKey, Call("POST", _KEYS, body=given, repeatable=False))

    async def list(self) -> tuple[ApiKey, ...]:
        """Every key there ever was, oldest first."""
        return (await self._core.read(KeyList, _KEYS)).items

    async def revoke(self, key_id: str) -> ApiKey:
        """End a key for good, within five seconds.

        Raises:
            NotFoundError: when there is none with this id.
            ConflictError: when it is the key of this client.
        """
        return await self._core.call(ApiKey, Call("DELETE", path_of(_KEYS, key_id)))


class AsyncCalls(Resource):
    """The whole API."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.tunings = AsyncTunings(core)
        self.recommendations = AsyncRecommendations(core)
        self.jobs = AsyncJobs(core)
        self.devices = AsyncDevices(core)
        self.queue = AsyncQueue(core)
        self.estimates = AsyncEstimates(core)
        self.gpus = AsyncGpus(core)
        self.keys = AsyncKeys(core)

    async def summary(self, period: Period | str = Period.DAY) -> Summary:
        """What happened within the last day, the last 7 days (`7d`) or ever (`all`), and what has not ended.

        Raises:
            ApiError: when the service refuses.
        """
        return await self._core.call(Summary, Call("GET", "/v1/summary", {"period": Period(period).value}))

    async def livez(self) -> Health:
        """Whether the service answers, asked once.

        Raises:
            ConnectionFailedError: when it does not.
        """
        return await self._core.call(Health, Call("GET", "/livez", repeatable=False))

    async def readyz(self) -> Health:
        """Whether the service can do its work, asked once.

        Raises:
            ServiceUnavailableError: when it cannot; the problem says why.
            ConnectionFailedError: when it does not answer.
        """
        return await self._core.call(Health, Call("GET", "/readyz", repeatable=False))

    async def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call for which there is no method here; it is tried again only if ``call.may_repeat``.

        Args:
            kind: the document it answers with.
            call: what to send.
            extra_seconds: what the service was asked to wait.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
            UnexpectedAnswerError: when it answers something else.
        """
        return await self._core.call(kind, call, extra_seconds)
