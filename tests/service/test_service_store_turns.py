"""Writers of one SQLite file in one process take turns, in the order in which they came."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from service.errors import StoreUnavailableError
from service.store.engine import open_engine, reading, writing
from service.store.turns import Turns, turns_of

WRITERS, WRITES = 6, 50


def test_whoever_waits_goes_before_whoever_comes_again() -> None:
    """Of writers that write without a pause none writes twice while another waits."""
    turns = Turns()
    order: list[int] = []
    together = threading.Barrier(WRITERS)
    held = 0

    def write(name: int) -> None:
        nonlocal held
        together.wait()
        for _ in range(WRITES):
            with turns.mine(10.0):
                held += 1
                assert held == 1
                order.append(name)
                time.sleep(0.0005)  # the others come meanwhile
                held -= 1

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    middle = order[WRITERS * 5 : -WRITERS * 5]
    rounds = [set(middle[start : start + WRITERS]) for start in range(0, len(middle) - WRITERS, WRITERS)]
    assert sum(len(it) == WRITERS for it in rounds) > 0.9 * len(rounds)


def test_one_that_gives_up_does_not_keep_the_others_from_going() -> None:
    """It says why, and whoever came after it is next."""
    turns = Turns()
    gone: list[str] = []

    def wait(name: str, patience_seconds: float) -> None:
        try:
            with turns.mine(patience_seconds):
                gone.append(name)
        except StoreUnavailableError as error:
            gone.append(f"{name}: {error}")

    with turns.mine(0.0):
        impatient = threading.Thread(target=wait, args=("impatient", 0.05))
        impatient.start()
        patient = threading.Thread(target=wait, args=("patient", 30.0))
        patient.start()
        impatient.join()
    patient.join()
    assert gone == ["impatient: the database cannot be used: other writers were not done in 0.05 s", "patient"]
    with turns.mine(0.0):
        gone.append("later")
    assert gone[-1] == "later"


def test_one_that_fails_lets_the_next_go() -> None:
    """As a transaction that is undone."""
    turns = Turns()
    with pytest.raises(RuntimeError, match="undone"), turns.mine(1.0):
        raise RuntimeError("undone")
    with turns.mine(0.0):
        pass


def test_a_transaction_that_writes_waits_for_its_turn(tmp_path: Path) -> None:
    """Whatever engine it goes through; one that reads does not wait."""
    path = tmp_path / "first.db"
    engine = open_engine(f"sqlite:///{path}")
    written = threading.Event()

    def write() -> None:
        with writing(engine) as connection:
            connection.execute(text("CREATE TABLE one (number INTEGER)"))
        written.set()

    with turns_of(str(path.resolve())).mine(0.0):
        writer = threading.Thread(target=write)
        writer.start()
        with reading(engine) as connection:
            assert connection.execute(text("SELECT 1")).scalar() == 1
        assert not written.wait(0.3)
    writer.join()
    assert written.is_set()
    engine.dispose()


def test_turns_belong_to_a_file(tmp_path: Path) -> None:
    """Two files are written at once."""
    first, second = str(tmp_path / "first.db"), str(tmp_path / "second.db")
    assert turns_of(first) is turns_of(first)
    with turns_of(first).mine(0.0), turns_of(second).mine(0.0):
        pass
