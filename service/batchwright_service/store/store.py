"""The store: every interface over one database."""

from __future__ import annotations

from sqlalchemy import Engine

from batchwright_service.store.api_keys import SqlKeyStore
from batchwright_service.store.database.audit_log import SqlAuditStore
from batchwright_service.store.database.engine import CONNECTIONS, open_engine
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.notifications import Listener, Receiver
from batchwright_service.store.devices import SqlDeviceStore, SqlFleetStore
from batchwright_service.store.evidence import SqlEvidenceStore, SqlResidualStore
from batchwright_service.store.leases import SqlLeaseStore
from batchwright_service.store.outbox.deliveries import SqlDeliveryStore
from batchwright_service.store.outbox.registrations import SqlWebhookStore
from batchwright_service.store.recommendation_queries import SqlRecommendationStore
from batchwright_service.store.retention import SqlRetentionStore
from batchwright_service.store.scheduling import SqlQueueStore
from batchwright_service.store.sessions import SqlSessionStore
from batchwright_service.store.statistics import SqlStatisticsStore
from batchwright_service.store.submissions import SqlSubmissionStore
from batchwright_service.store.work_queries import SqlWorkStore


class Store:
    """The interfaces over one engine. Each call is a short transaction. Safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.submissions = SqlSubmissionStore(engine)
        self.leases = SqlLeaseStore(engine)
        self.evidence = SqlEvidenceStore(engine)
        self.queue = SqlQueueStore(engine)
        self.work = SqlWorkStore(engine)
        self.recommendations = SqlRecommendationStore(engine)
        self.residuals = SqlResidualStore(engine)
        self.statistics = SqlStatisticsStore(engine)
        self.retention = SqlRetentionStore(engine)
        self.devices = SqlDeviceStore(engine)
        self.fleet = SqlFleetStore(engine, self.queue)
        self.keys = SqlKeyStore(engine)
        self.sessions = SqlSessionStore(engine)
        self.audit = SqlAuditStore(engine)
        self.webhooks = SqlWebhookStore(engine)
        self.deliveries = SqlDeliveryStore(engine)

    def new_listener(self, owner: str, receiver: Receiver) -> Listener | None:
        """Return a listener that is not started, or None where the database sends no notifications."""
        if self.engine.dialect.name != "postgresql":
            return None
        return Listener(self.engine, owner, receiver)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self.engine.dispose()


def open_store(url: str, connections: int = CONNECTIONS) -> Store:
    """Open the store at a database URL, and migrate its schema; ``connections`` are open at most.

    Raises:
        ConfigurationError: when the URL names no supported database.
        StoreUnavailableError: when the database cannot be reached.
    """
    engine = open_engine(url, connections)
    try:
        upgrade(engine)
    except BaseException:
        engine.dispose()
        raise
    return Store(engine)
