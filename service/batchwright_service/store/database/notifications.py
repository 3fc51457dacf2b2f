"""Notifications of PostgreSQL: sent within the transaction that queues or cancels work, received by one connection.

Each worker process listens to a channel of its own. Queued work notifies one waiting worker that can take it, so that
a fleet does not wake for one piece of work. A notification may be lost with a connection; a heartbeat finds its work.
"""

import hashlib
import os
import random
import selectors
import threading
import time
from contextlib import closing
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, TextClause, text

from batchwright_service.domain.hardware import ANY_DEVICE
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database.lanes import waiting_kinds
from batchwright_service.store.database.transactions import translate_errors, write_transaction

_QUEUED = "queued "
_CANCELLED = "cancelled "
_HELLO = "hello"
_FIRST_DELAY_SECONDS = 0.2
_MAX_DELAY_SECONDS = 10.0
_HELLO_SECONDS = 10.0
"""The time for which the first notification may be on its way, before the connection counts as one without any."""
_CHECK_SECONDS = 30.0
"""Interval at which an idle connection is used, so that a broken one is noticed."""

_CHANNEL = "'batchwright_' || left(encode(sha256(convert_to(owner, 'UTF8')), 'hex'), 32)"


def _notify_waiting(wanted: str) -> TextClause:
    """Return the statement for workers under a condition; no join, whose plan would begin with the busy devices."""
    return text(f"""
        WITH chosen AS (
            UPDATE workers SET waits = false WHERE waits AND slot = (
                SELECT slot FROM workers AS candidate
                WHERE waits AND {wanted}
                    AND heartbeat_at + lease_ms > CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)
                    AND (
                        SELECT min(id) FROM work_items
                        WHERE work_items.slot = candidate.slot AND work_items.state IN ('CANCELLING', 'RUNNING')
                    ) IS NULL
                LIMIT 1 FOR UPDATE SKIP LOCKED
            )
            RETURNING owner, slot
        )
        SELECT pg_notify({_CHANNEL}, '{_QUEUED}' || slot) FROM chosen
    """)  # noqa: S608 - constants of this module


_NOTIFY_DEVICE = _notify_waiting("device = :device")
_NOTIFY_KIND_OF_DEVICE = _notify_waiting("device = :device AND hardware = :hardware")
_NOTIFY_KINDS = _notify_waiting("device = ANY(CAST(:devices AS TEXT[])) AND hardware = ANY(CAST(:kinds AS TEXT[]))")
"""Of the waiting workers for the work one is chosen, which counts as waiting no more. Others that are being chosen by
concurrent transactions are skipped."""
_NOTIFY = text("SELECT pg_notify(:channel, :message)")


def notify_waiting(connection: Connection, device: str, hardware: str | None) -> None:
    """Notify one waiting worker, when the transaction is committed, of work for a device. Last in a transaction.

    Args:
        connection: the connection of the transaction.
        device: the device that the work needs; ``ANY_DEVICE`` for work that needs hardware.
        hardware: the kind of device, or the lane of work that needs hardware.
    """
    if connection.dialect.name != "postgresql":
        return
    if device == ANY_DEVICE:
        if waiting := waiting_kinds(connection, hardware or ""):
            devices, kinds = (sorted(set(names)) for names in zip(*waiting, strict=True))
            connection.execute(_NOTIFY_KINDS, {"devices": devices, "kinds": kinds})
    elif hardware is None:
        connection.execute(_NOTIFY_DEVICE, {"device": device})
    else:
        connection.execute(_NOTIFY_KIND_OF_DEVICE, {"device": device, "hardware": hardware})


def notify_owner(connection: Connection, owner: str, work_id: str) -> None:
    """Notify the owner of a lease, when the transaction is committed, that its work was cancelled."""
    if connection.dialect.name == "postgresql":
        connection.execute(_NOTIFY, {"channel": channel_of(owner), "message": f"{_CANCELLED}{work_id}"})


def channel_of(owner: str) -> str:
    """Return the channel of a worker process; names of owners are longer than those of channels may be."""
    return f"batchwright_{hashlib.sha256(owner.encode()).hexdigest()[:32]}"


class Receiver(Protocol):
    """The receiver of a process's notifications."""

    def work_queued(self, slot: str) -> None:
        """Work for a slot was queued, and its worker does not count as waiting any more."""

    def work_cancelled(self) -> None:
        """Work of this process was cancelled."""

    def notifications_resumed(self) -> None:
        """Notifications arrive from now on; earlier ones may have been lost."""

    def notifications_lost(self, error: Exception) -> None:
        """No notifications arrive until they resume."""


class Listener:
    """Receive the notifications of one worker process, on a connection that is opened again when it breaks.

    The receiver is called in the listener's thread.
    """

    def __init__(self, engine: Engine, owner: str, receiver: Receiver) -> None:
        self._engine = engine
        self._channel = channel_of(owner)
        self._receiver = receiver
        self._stopping = threading.Event()
        self._stop_read, self._stop_write = os.pipe()
        self.is_live = False
        """True if notifications arrive: the connection is open, and one has come through."""
        self._thread = threading.Thread(target=self._listen, name="notifications", daemon=True)

    def start(self) -> None:
        """Start to listen, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to listen. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.write(self._stop_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _listen(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._stopping.is_set():
            try:
                with translate_errors(), self._engine.connect() as connection:
                    driver: Any = connection.connection.driver_connection
                    connection.detach()  # the pool may open another in its place, and never lends this one
                    with closing(driver):
                        self._receive_until_stopped(driver)
            except Exception as error:  # noqa: BLE001 - without the thread, polling would be all that is left
                self._receiver.notifications_lost(error)
            delay = _FIRST_DELAY_SECONDS if self.is_live else min(2 * delay, _MAX_DELAY_SECONDS)
            self.is_live = False
            self._stopping.wait(delay * random.uniform(0.5, 1.5))

    def _receive_until_stopped(self, driver: Any) -> None:  # noqa: ANN401 - a connection of psycopg's
        driver.autocommit = True
        driver.execute(f"LISTEN {self._channel}")
        with write_transaction(self._engine) as other:  # a pooler between would lose the notification
            other.execute(_NOTIFY, {"channel": self._channel, "message": _HELLO})
        hello_until = time.monotonic() + _HELLO_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._stop_read, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if not selector.select(_CHECK_SECONDS if self.is_live else _HELLO_SECONDS):
                    driver.execute("SELECT 1")
                self._receive(driver)
                if not self.is_live and time.monotonic() > hello_until:
                    raise StoreUnavailableError("none arrives: a pooler that shares connections loses them")

    def _receive(self, driver: Any) -> None:  # noqa: ANN401 - a connection of psycopg's
        for notification in driver.notifies(timeout=0):
            message: str = notification.payload
            if message == _HELLO:
                self.is_live = True
                self._receiver.notifications_resumed()
            elif message.startswith(_QUEUED):
                self._receiver.work_queued(message.removeprefix(_QUEUED))
            elif message.startswith(_CANCELLED):
                self._receiver.work_cancelled()
