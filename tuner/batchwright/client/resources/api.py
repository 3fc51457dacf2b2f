"""Every call of the API by resource. ``AsyncClient`` has the calls as coroutines; ``Client`` makes them blocking."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime

from batchwright.client.core import PAGE_SIZE, Core, Resource
from batchwright.client.documents.api_keys import ApiKey, CreatedKey, KeyList, KeySubmission, Scope
from batchwright.client.documents.audit import AuditAction, AuditEntry, AuditPage
from batchwright.client.documents.commands import CommandList, RegisteredCommand
from batchwright.client.documents.fleet import Fleet
from batchwright.client.documents.work import GpuList
from batchwright.client.documents.workers import (
    DeviceList,
    DeviceStatus,
    Health,
    Occupancy,
    OccupancyPeriod,
    Period,
    Queue,
    QueueEntry,
    Summary,
)
from batchwright.client.http_messages import Call, DocumentT, path_of
from batchwright.client.resources.jobs import AsyncJobs
from batchwright.client.resources.tunings import AsyncRecommendations, AsyncTunings
from batchwright.client.resources.webhooks import AsyncWebhooks
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.gpus import Gpu

_KEYS = "/v1/keys"
_LONGEST_QUEUE_SECONDS = 15.0
"""Longer than the service lets an estimate wait for a free slot."""


class AsyncDevices(Resource):
    """The devices of the service."""

    async def list(self) -> tuple[DeviceStatus, ...]:
        """List the devices, with the work that runs on each."""
        return (await self._core.read(DeviceList, "/v1/devices")).items


class AsyncQueues(Resource):
    """The queue of waiting work."""

    async def list(self, limit: int | None = None, slot: str | None = None) -> tuple[QueueEntry, ...]:
        """List the waiting tunings and jobs in their order, with their expected waits.

        Args:
            limit: most entries to return; 50 without.
            slot: only what the worker of this slot (host and device) can take.
        """
        return (await self._core.call(Queue, Call("GET", "/v1/queue", {"limit": limit, "slot": slot}))).items


class AsyncEstimates(Resource):
    """Estimates of what fits on GPUs, which need not be present."""

    async def create(self, request: EstimateRequest) -> Estimate:
        """Estimate the memory of a workload. The call lasts until the estimate ends or its own time limit is reached.

        Raises:
            ApiError: when the service refuses the request, cannot trace the workload, or stays busy (`estimates-busy`).
        """
        call = Call("POST", "/v1/estimates", body=request, repeatable=True)
        return await self._core.call(Estimate, call, request.timeout_seconds + _LONGEST_QUEUE_SECONDS)


class AsyncGpus(Resource):
    """The catalogue of GPUs for estimates."""

    async def list(self) -> tuple[Gpu, ...]:
        """List the catalogue, with the source of every figure."""
        return (await self._core.read(GpuList, "/v1/gpus")).items


class AsyncCommands(Resource):
    """The commands that the operator has registered, which a tuning can name."""

    async def list(self) -> tuple[RegisteredCommand, ...]:
        """List the commands with the JSON Schema of their arguments; none where the operator has registered none."""
        return (await self._core.read(CommandList, "/v1/commands")).items


class AsyncKeys(Resource):
    """API keys; for callers with the scope `admin`."""

    async def create(
        self, name: str, scopes: Sequence[Scope | str], expires_in_days: float | None = None
    ) -> CreatedKey:
        """Create a key. Its secret is ``key`` of the result and is never shown again. The call is never retried.

        Raises:
            ConnectionFailedError: when no response came; a key that nobody has may have been created.
        """
        submission = KeySubmission(
            name=name, scopes=tuple(Scope(scope) for scope in scopes), expires_in_days=expires_in_days
        )
        return await self._core.call(CreatedKey, Call("POST", _KEYS, body=submission, repeatable=False))

    async def list(self) -> tuple[ApiKey, ...]:
        """List all keys, revoked ones included, oldest first."""
        return (await self._core.read(KeyList, _KEYS)).items

    async def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key for good. Every process of the service refuses it within five seconds.

        Raises:
            NotFoundError: when there is no key with this id.
            ConflictError: when the key is that of this client.
        """
        return await self._core.call(ApiKey, Call("DELETE", path_of(_KEYS, key_id)))


class AsyncAudit(Resource):
    """The audit log: who submitted, cancelled or deleted work, made or revoked keys, or signed in."""

    def list(  # noqa: PLR0913 - one per filter
        self,
        *,
        action: AuditAction | str | None = None,
        key_id: str | None = None,
        object_id: str | None = None,
        after: datetime | None = None,
        until: datetime | None = None,
        exclude: Sequence[AuditAction | str] = (),
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[AuditEntry, None]:
        """Iterate over the matching entries, newest first, fetched page by page. Needs the scope `admin`.

        Args:
            action: one kind of act.
            key_id: only acts of the caller with this API key.
            object_id: only acts on this tuning, job or key.
            after: only acts after this time.
            until: only acts until this time.
            exclude: kinds of acts to leave out.
            page_size: entries of one request.

        Raises:
            NotAllowedError: when the key lacks the scope.
        """
        times = {"after": after, "until": until}
        given = {name: value.isoformat() for name, value in times.items() if value is not None}
        filters = {"action": action, "key_id": key_id, "object_id": object_id, "exclude": exclude, **given}
        return self._core.rows(AuditPage, Call("GET", "/v1/audit", {**filters, "limit": page_size}))


class AsyncCalls(Resource):
    """The whole API."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.tunings = AsyncTunings(core)
        self.recommendations = AsyncRecommendations(core)
        self.jobs = AsyncJobs(core)
        self.devices = AsyncDevices(core)
        self.queue = AsyncQueues(core)
        self.estimates = AsyncEstimates(core)
        self.gpus = AsyncGpus(core)
        self.commands = AsyncCommands(core)
        self.keys = AsyncKeys(core)
        self.audit = AsyncAudit(core)
        self.webhooks = AsyncWebhooks(core)

    async def occupancy(self, period: OccupancyPeriod | str = OccupancyPeriod.DAY) -> Occupancy:
        """Return the shares of time for which work held each device: of the last day, or of the last 7 days (`7d`)."""
        given = {"period": OccupancyPeriod(period).value}
        return await self._core.call(Occupancy, Call("GET", "/v1/occupancy", given))

    async def summary(self, period: Period | str = Period.DAY) -> Summary:
        """Summarise the work of the last day, the last 7 days (`7d`) or all time (`all`), and what has not ended."""
        return await self._core.call(Summary, Call("GET", "/v1/summary", {"period": Period(period).value}))

    async def fleet(self) -> Fleet:
        """List the Ray and Slurm clusters that run the work, with their nodes and the reasons why work waits."""
        return await self._core.call(Fleet, Call("GET", "/v1/fleet"))

    async def livez(self) -> Health:
        """Check once whether the service responds.

        Raises:
            ConnectionFailedError: when the service does not respond.
        """
        return await self._core.call(Health, Call("GET", "/livez", repeatable=False))

    async def readyz(self) -> Health:
        """Check once whether the service can do its work.

        Raises:
            ServiceUnavailableError: when it is not ready; the problem names the reasons.
            ConnectionFailedError: when the service does not respond.
        """
        return await self._core.call(Health, Call("GET", "/readyz", repeatable=False))

    async def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call for which there is no method. It is retried only if ``call.may_repeat``.

        Args:
            kind: the document in the response.
            call: the request.
            extra_seconds: the time the service was asked to wait.
        """
        return await self._core.call(kind, call, extra_seconds)
