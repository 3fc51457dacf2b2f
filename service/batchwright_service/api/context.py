"""The application context: the objects that routes call, built once in ``batchwright_service.bootstrap``."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from batchwright.client.documents.states import WorkKind
from batchwright_service.api.authentication import Authenticators
from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.api.reads.coalesced import Reads
from batchwright_service.application.api_keys import KeyCases
from batchwright_service.application.estimates import EstimateCases
from batchwright_service.application.exports import ExportCases
from batchwright_service.application.jobs import JobCases
from batchwright_service.application.queue import DeviceCases, QueueCases
from batchwright_service.application.readiness import Readiness
from batchwright_service.application.statistics import OccupancyCases, SummaryCases
from batchwright_service.application.tunings import TuningCases
from batchwright_service.auth.audit_trail import AuditTrail
from batchwright_service.observability.instruments import Instruments
from batchwright_service.registry.registered_commands import RegisteredCommands
from batchwright_service.webhooks.management import WebhookCases


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    """The use cases and the objects that requests share: authenticators, change feed and coalesced reads."""

    tunings: TuningCases
    jobs: JobCases
    devices: DeviceCases
    queue: QueueCases
    exports: ExportCases
    keys: KeyCases
    audit: AuditTrail
    webhooks: WebhookCases
    summary: SummaryCases
    occupancy: OccupancyCases
    estimates: EstimateCases
    commands: RegisteredCommands
    readiness: Readiness
    instruments: Instruments
    authenticators: Authenticators
    feed: ChangeFeed
    reads: Reads
    wake_workers: Callable[[], None]
    """Has the workers of this host check for work and for cancellations now. Never blocks."""

    def cases(self, kind: WorkKind) -> TuningCases | JobCases:
        """Return the use cases of a kind of work."""
        return self.tunings if kind is WorkKind.TUNING else self.jobs


async def _context(request: Request) -> ApiContext:  # one that is no coroutine would cost a hop to a thread
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]


async def _wake_workers(context: Context) -> AsyncIterator[None]:
    yield
    context.wake_workers()


WAKES_WORKERS = Depends(_wake_workers)
"""Dependency of each route that queues or cancels work: after it, the workers of this host need not wait to poll."""
