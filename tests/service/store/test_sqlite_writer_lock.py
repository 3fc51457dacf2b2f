"""Writers of one SQLite file in one process hold the lock in the order of their requests."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database.transactions import FairLock, open_engine, read_transaction, write_transaction

WRITERS, WRITES = 6, 50
PATIENCE_SECONDS = 120.0


def test_whoever_waits_goes_before_whoever_comes_again() -> None:
    """Writers go in the order in which they came, one at a time; one that writes again goes behind those that wait."""
    lock = FairLock()
    order: list[int] = []
    came = 0

    def write(name: int) -> None:
        nonlocal came
        for _ in range(WRITES):
            with lock.acquire(PATIENCE_SECONDS):
                order.append(name)
                held = len(order)
                until_waiting(lock, came)
                assert held == len(order)
                if len(order) > WRITERS * (WRITES - 1):
                    came -= 1  # this one comes no more

    with ThreadPoolExecutor(WRITERS) as pool, lock.acquire(0.0):
        writers = []
        for name in range(WRITERS):
            writers.append(pool.submit(write, name))
            until_waiting(lock, name + 2)  # behind this thread
        came = WRITERS
    for writer in writers:
        writer.result()
    assert order == list(range(WRITERS)) * WRITES


def until_waiting(lock: FairLock, count: int) -> None:
    """Wait until so many have a turn or wait for one."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.001)):
        if len(lock._waiting) >= count:
            return
        pause.wait(0.001)
    raise AssertionError(f"{len(lock._waiting)} of {count} wait")


def test_one_that_gives_up_does_not_keep_the_others_from_going() -> None:
    """The error gives the reason, and the next waiter gets the lock."""
    lock = FairLock()
    gone: list[str] = []

    def wait(name: str, timeout_seconds: float) -> None:
        try:
            with lock.acquire(timeout_seconds):
                gone.append(name)
        except StoreUnavailableError as error:
            gone.append(f"{name}: {error}")

    with lock.acquire(0.0):
        impatient = threading.Thread(target=wait, args=("impatient", 0.05))
        impatient.start()
        patient = threading.Thread(target=wait, args=("patient", PATIENCE_SECONDS))
        patient.start()
        impatient.join()
    patient.join()
    assert gone == ["impatient: the database cannot be used: other writers held it for 0.05 s", "patient"]
    with lock.acquire(0.0):
        gone.append("later")
    assert gone[-1] == "later"


def test_one_that_fails_lets_the_next_go() -> None:
    """As a transaction that is undone."""
    lock = FairLock()
    with pytest.raises(RuntimeError, match="undone"), lock.acquire(1.0):
        raise RuntimeError("undone")
    with lock.acquire(0.0):
        pass


def test_a_transaction_that_writes_waits_for_its_turn(tmp_path: Path) -> None:
    """One that reads does not wait."""
    engine = open_engine(f"sqlite:///{tmp_path / 'first.db'}")
    written = threading.Event()

    def write() -> None:
        with write_transaction(engine) as connection:
            connection.execute(text("CREATE TABLE one (number INTEGER)"))
        written.set()

    lock: FairLock = engine.get_execution_options()["writer_lock"]
    with lock.acquire(0.0):
        writer = threading.Thread(target=write)
        writer.start()
        with read_transaction(engine) as connection:
            assert connection.execute(text("SELECT 1")).scalar() == 1
        assert not written.wait(0.3)
    writer.join()
    assert written.is_set()
    engine.dispose()


def test_each_engine_has_a_lock_of_its_own(tmp_path: Path) -> None:
    """Two files are written at once."""
    engines = [open_engine(f"sqlite:///{tmp_path / name}") for name in ("first.db", "second.db")]
    with write_transaction(engines[0]), write_transaction(engines[1]):
        pass
    for engine in engines:
        engine.dispose()
