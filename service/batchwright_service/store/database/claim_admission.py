"""Admission to the line for the lock of claims on PostgreSQL: few claimers stand in it, and the others come back later.

Hundreds of processes may claim at once, after a restart of the database or while short work is queued. If all stood in
the line, each would wait for all before it, until its lock timed out. The server also looks for deadlocks in a line, at
a cost that grows faster than the line. A claimer therefore needs one of a few tickets, advisory locks that its
transaction holds. One that finds none ends its transaction and sleeps for a random time.

The lock itself serialises the claims (``claim_statements``); the tickets only keep the line short.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from sqlalchemy import Connection, Engine, text

from batchwright_service.errors import ClaimsCrowdedError
from batchwright_service.store.database.claim_statements import CLAIM_SETTINGS

TICKETS = 16
"""Claimers that may stand in the line. A few would keep the lock in use if their processes never paused between the
statements of a claim; with 16, the last one waits for about a tenth of a second."""
TICKET_CLASS = 0x62617463
"""The first key of the tickets, an arbitrary number that no other pair of keys begins with: "batc"."""
_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 1.0
"""The longest delay in the mean: 250 waiting processes so try 250 times a second, 0.1 ms of the server each."""

_ADMIT = text(f"""
    SELECT settings.*, (
        SELECT number FROM generate_series(1, {TICKETS}) AS number
        WHERE pg_try_advisory_xact_lock({TICKET_CLASS}, number) LIMIT 1
    ) AS ticket
    FROM ({CLAIM_SETTINGS.text}) AS settings
""")  # noqa: S608 - constants
"""Settle the plans of the transaction, and take the first ticket that is free, if there is one."""

Transaction = Callable[[Engine], AbstractContextManager[Connection]]


@contextmanager
def admitted(engine: Engine, transaction: Transaction, wait_seconds: float) -> Iterator[Connection]:
    """Open a transaction that may stand in the line for the lock of claims. SQLite admits all: it has its own line.

    Raises:
        ClaimsCrowdedError: when there was no ticket in time.
        StoreUnavailableError: when the database cannot be reached.
    """
    deadline = time.monotonic() + wait_seconds
    delay = _FIRST_DELAY_SECONDS
    while True:
        with ExitStack() as attempt:
            connection = attempt.enter_context(transaction(engine))
            if connection.dialect.name != "postgresql" or connection.execute(_ADMIT).one().ticket is not None:
                with attempt.pop_all():
                    yield connection
                return
        if time.monotonic() > deadline:
            raise ClaimsCrowdedError(f"other claims went first for {wait_seconds:g} s; this one is repeated")
        time.sleep(delay * random.uniform(0.5, 1.5))
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
