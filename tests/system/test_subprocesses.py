"""Processes at the other end of a socket, started when they are asked for and ahead of that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner.cli import entry
from tuner.estimation.client import TracingProcess
from tuner.estimation.worker_start import tracing
from tuner.hardware.inventory import cpu
from tuner.probing.fork_server_start import fork_server
from tuner.probing.supervisor import ProbeSupervisor
from tuner.system.subprocesses import Partner, Start, end_those_ahead, start_ahead, started


def _start(asked: str = "once") -> Start:
    return Start("tests.support.child_of_socket", ("one", "two words"), {"ASKED": asked})


def _told(partner: Partner) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(partner.connection.makefile().readline())
    return found


def _left(partner: Partner) -> int:
    partner.close()
    return partner.process.wait(120)


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    end_those_ahead()


def test_a_partner_knows_what_it_was_started_for() -> None:
    """Its arguments, its environment and who asks; its input is the socket's no more. It ends when it is left."""
    partner = started(_start())
    expected = {"parent": os.getpid(), "arguments": ["one", "two words"], "asked": "once", "input": ""}
    assert _told(partner) == expected
    assert partner.said(15) == "the last words"
    assert len(partner.said(4000)) == 1014
    assert _left(partner) == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Partner]:
    """The partners of a test, in the order of their start."""
    found: list[Partner] = []
    real = Partner.__init__

    def note(partner: Partner, start: Start) -> None:
        real(partner, start)
        found.append(partner)

    monkeypatch.setattr(Partner, "__init__", note)
    return found


def test_what_was_started_ahead_is_taken_once(made: list[Partner]) -> None:
    """The first who asks in the same way has it; the second a new one."""
    start_ahead(_start())
    first, second = started(_start()), started(_start())
    start_ahead(_start())
    third = started(_start())
    assert made == [first, second, third]
    assert [_told(it)["asked"] for it in made] == ["once"] * 3
    assert [_left(it) for it in made] == [0] * 3


def test_what_has_ended_meanwhile_is_not_taken(made: list[Partner]) -> None:
    """It was killed, or had nothing to do for long."""
    start_ahead(_start())
    made[0].process.kill()
    made[0].process.wait()
    partner = started(_start())
    assert _told(partner)["asked"] == "once"
    assert made == [made[0], partner]
    assert _left(partner) == 0


def test_what_it_has_started_ends_with_it(made: list[Partner]) -> None:
    """A compiler, say: nobody is left to wait for it."""
    start_ahead(Start("tests.support.child_of_socket", ("has a child",), {"ASKED": ""}))
    child = Path(f"/proc/{_told(made[0])['child']}")
    assert child.exists()
    end_those_ahead()
    deadline = time.monotonic() + 120
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_estimate_takes_the_process_that_the_command_started(made: list[Partner]) -> None:
    """And a probe's supervisor its own: what ``begin`` starts is what they ask for."""
    entry.begin(["estimate", "spec.yaml"])
    entry.begin(["tune", "spec.yaml", "--device", "cpu"])
    with TracingProcess() as tracer, ProbeSupervisor(cpu()) as supervisor:
        supervisor.warm_up()
        assert [tracer.pid, supervisor._server and supervisor._server.process.pid] == [it.process.pid for it in made]


def test_what_was_started_in_another_way_is_ended(made: list[Partner]) -> None:
    """A wrong guess costs its process, and no more."""
    start_ahead(_start("otherwise"))
    partner = started(_start())
    assert _told(partner)["asked"] == "once"
    assert [it.process.returncode for it in made] == [-signal.SIGKILL, None]
    start_ahead(_start("unasked"))
    end_those_ahead()
    assert made[-1].process.returncode == -signal.SIGKILL
    assert _left(partner) == 0


def test_what_cannot_be_started_ahead_is_told_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: the command may not need it."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    start_ahead(_start())
    with pytest.raises(FileNotFoundError):
        started(_start())
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


_CPU, _CARD, _TRACING = fork_server("cpu"), fork_server("cuda"), tracing()


@pytest.mark.parametrize(
    ("arguments", "without_cards", "with_cards"),
    [
        ("estimate spec.yaml --gpu H100-80GB", _TRACING, _TRACING),
        ("tune spec.yaml --effective-batch-size 8", _CPU, _CARD),
        ("run spec.yaml --effective-batch-size 8 --device cuda:1", _CPU, _CARD),
        ("tune spec.yaml --device cpu", _CPU, _CPU),
        ("tune --device=cpu spec.yaml", _CPU, _CPU),
        ("tune spec.yaml --device", _CPU, _CARD),
        ("tune --help", None, None),
        ("estimate -h", None, None),
        ("plan --effective-batch-size 8", None, None),
        ("", None, None),
    ],
)
def test_the_command_starts_what_it_will_need(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    without_cards: Start | None,
    with_cards: Start | None,
) -> None:
    """Before it knows more than its words, and whether the host has cards."""
    begun: list[Start | None] = []
    monkeypatch.setattr(entry, "start_ahead", begun.append)
    monkeypatch.setattr(entry, "_CARDS", tmp_path / "gpus")
    entry.begin(arguments.split())
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    entry.begin(arguments.split())
    assert begun == [it for it in (without_cards, with_cards) if it is not None]


def test_what_starts_ahead_imports_next_to_nothing() -> None:
    """Neither pydantic nor typer, which take longer to import than a process takes to start."""
    code = "import sys, tuner.cli.entry; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "typer", "rich", "yaml", "torch"} & set(modules)
