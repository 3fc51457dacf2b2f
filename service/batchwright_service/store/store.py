"""The store: the classes of all subjects over one database."""

from sqlalchemy import Engine

from batchwright_service.store.api_keys import KeyStore
from batchwright_service.store.database.audit_log import AuditStore
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.notifications import Listener, Receiver
from batchwright_service.store.database.transactions import CONNECTIONS, open_engine
from batchwright_service.store.devices import DeviceStore, FleetStore
from batchwright_service.store.evidence import EvidenceStore, ResidualStore
from batchwright_service.store.leases import LeaseStore
from batchwright_service.store.outbox.deliveries import DeliveryStore
from batchwright_service.store.outbox.registrations import WebhookStore
from batchwright_service.store.recommendation_queries import RecommendationStore
from batchwright_service.store.retention import RetentionStore
from batchwright_service.store.scheduling import QueueStore
from batchwright_service.store.sessions import SessionStore
from batchwright_service.store.statistics import StatisticsStore
from batchwright_service.store.submissions import SubmissionStore
from batchwright_service.store.work_queries import WorkStore


class Store:
    """The classes of all subjects over one engine. Each call is a short transaction. Safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.submissions = SubmissionStore(engine)
        self.leases = LeaseStore(engine)
        self.evidence = EvidenceStore(engine)
        self.queue = QueueStore(engine)
        self.work = WorkStore(engine)
        self.recommendations = RecommendationStore(engine)
        self.residuals = ResidualStore(engine)
        self.statistics = StatisticsStore(engine)
        self.retention = RetentionStore(engine)
        self.devices = DeviceStore(engine)
        self.fleet = FleetStore(engine, self.queue)
        self.keys = KeyStore(engine)
        self.sessions = SessionStore(engine)
        self.audit = AuditStore(engine)
        self.webhooks = WebhookStore(engine)
        self.deliveries = DeliveryStore(engine)

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
