"""Fills the database of ``api_load.py``: tunings with their answers, and tunings that wait and can be followed."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from sqlalchemy import insert

from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.database.mapping import recommendation_values, sort_values
from batchwright_service.store.database.schema import recommendations, work_items
from batchwright_service.store.database.transactions import open_engine, write_transaction
from tests.support.factories import CPU, tuning_request
from tests.support.service.scripted import ScriptedRunner

_CHUNK = 2_000
_LARGEST = 3_000
"""What fits in the tuning whose answer is stored again and again: found with some ten probes."""
UNSERVED_DEVICE = "cuda:7"


def an_answer() -> Recommendation:
    """A recommendation of a usual size, made by a search whose probes are answered from a formula."""
    request = tuning_request(effective_batch_size=65_536, memory_limit_bytes=2**33)
    tuning = TuningSession(request, CPU, environment={}, versions={"torch": "2.8"})
    runner = ScriptedRunner(_LARGEST)
    while (probe := tuning.next_probe()) is not None:
        tuning.record(runner.run(probe))
    return tuning.recommendation(identifier="rec_" + "0" * 32, created_at=datetime.now(UTC), total_seconds=1.0)


class Rows:
    """Stores rows in bulk, as the service would have one by one."""

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._new_id = IdentifierSource().new
        self._answer = an_answer()
        self._request = self._answer.request.model_dump_json()
        self._document = self._answer.model_dump_json()
        self.recommendation_ids: list[str] = []

    def grow_to(self, count: int) -> None:
        """Add tunings that have their answers, until there are this many of each."""
        pairs = (self._answered() for _ in range(count - len(self.recommendation_ids)))
        while chunk := list(islice(pairs, _CHUNK)):
            with write_transaction(self._engine) as connection:
                connection.execute(insert(work_items), [work for work, _ in chunk])
                connection.execute(insert(recommendations), [answer for _, answer in chunk])

    def add_waiting(self, count: int) -> list[str]:
        """Add tunings that wait for a device which nobody serves; their identifiers."""
        works = [self._work("QUEUED", UNSERVED_DEVICE) for _ in range(count)]
        with write_transaction(self._engine) as connection:
            connection.execute(insert(work_items), works)
        return [work["id"] for work in works]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _answered(self) -> tuple[dict[str, Any], dict[str, Any]]:
        work = self._work("SUCCEEDED", "cpu")
        identifier = self._new_id("rec")
        self.recommendation_ids.append(identifier)
        answer = recommendation_values(self._answer, work["id"], work["model"], None)
        document = self._document.replace(self._answer.id, identifier)
        ended = {"recommendation_id": identifier, "started_at": work["created_at"], "ended_at": work["updated_at"]}
        ended |= sort_values(answer)
        return work | ended, answer | {"id": identifier, "document": document}

    def _work(self, state: str, device: str) -> dict[str, Any]:
        now = time.time_ns() // 1_000_000
        return {
            "id": self._new_id("tun"),
            "kind": "tuning",
            "state": state,
            "device": device,
            "model": "mlp",
            "effective_batch_size": self._answer.request.effective_batch_size,
            "fingerprint": self._answer.fingerprint,
            "created_at": now,
            "updated_at": now,
            "payload": self._request,
        }


def in_turn(values: list[str], count: int) -> Iterator[str]:
    """``count`` of the values, evenly spread."""
    return (values[place * len(values) // count] for place in range(count))
