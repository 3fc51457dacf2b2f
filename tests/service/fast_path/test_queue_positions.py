"""Queue positions are read once for all polling callers."""

from typing import Any

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import QueuePosition
from batchwright.client.documents.workers import Queue, QueueEntry
from batchwright_service.fast_path.queue_positions import QueuePositions


def test_a_long_queue_is_not_read_for_each_new_entry() -> None:
    """A read that takes 0.1 s is not repeated for 0.4 s: until then newly queued work has no position."""
    reads: list[float] = []
    now = [0.0]

    def read(_: int) -> Queue:
        reads.append(now[0])
        now[0] += 0.1
        return Queue(items=tuple(entry(name, position) for position, name in enumerate("ab"[: len(reads)], start=1)))

    positions = QueuePositions(read, lambda: now[0])
    assert positions.of("a", State.QUEUED) is not None
    now[0] += 0.3
    assert positions.of("b", State.QUEUED) is None
    assert len(reads) == 1
    now[0] += 0.2
    assert positions.of("b", State.QUEUED) is not None
    assert len(reads) == 2


def test_the_queue_is_read_once_for_many_callers() -> None:
    """Newly queued work is looked up at once; work too far behind has no position."""
    reads: list[int] = []
    now = [0.0]

    def read(limit: int) -> Queue:
        reads.append(limit)
        names = ["a", "b", "c"][: len(reads) + 1]
        return Queue(items=tuple(entry(name, position) for position, name in enumerate(names, start=1)))

    positions = QueuePositions(read, lambda: now[0])
    assert [positions.of("a", State.QUEUED), positions.of("b", State.QUEUED)] == [
        QueuePosition(position=1, expected_wait_seconds=3.0),
        QueuePosition(position=2, expected_wait_seconds=3.0),
    ]
    assert len(reads) == 1
    third = positions.of("c", State.QUEUED)
    assert third is not None
    assert third.position == 3
    assert len(reads) == 2
    now[0] += 2.0
    assert positions.of("a", State.QUEUED) is not None
    assert len(reads) == 3
    assert positions.of("a", State.RUNNING) is None
    assert len(reads) == 3


def entry(name: str, position: int) -> QueueEntry:
    """Return an entry of the queue."""
    fields: dict[str, Any] = {
        "kind": WorkKind.TUNING,
        "device": "cpu",
        "model": "mlp",
        "effective_batch_size": 8,
        "priority": 0,
    }
    return QueueEntry(id=name, position=position, age_seconds=1.0, expected_wait_seconds=3.2, **fields)
