"""Child processes connected by a socket pair, started on demand or in advance."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchwright.cli import entry
from batchwright.early_processes import EarlyProcesses
from batchwright.estimation.client import tracing_server
from batchwright.estimation.worker_start import tracing_worker
from batchwright.hardware.inventory import cpu
from batchwright.probing.fork_server_start import fork_server
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.system.fork_server.spawn import ChildProcess, Prestarted, Start


def _start(asked: str = "once") -> Start:
    return Start("tests.support.child_of_socket", ("one", "two words"), {"ASKED": asked})


def _reported(child: ChildProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(child.connection.recv_bytes())
    return found


def _left(child: ChildProcess) -> int:
    """Close the connection, and return the exit status of the process."""
    child.connection.close()
    status = child.process.wait(120)
    child.close()
    return status


@pytest.fixture
def prestarted() -> Iterator[Prestarted]:
    """Prestarted processes, closed at the end."""
    with closing(Prestarted()) as found:
        yield found


def test_a_child_process_receives_its_parameters() -> None:
    """The child has its arguments, environment and parent, has no input, and ends with its connection."""
    child = ChildProcess(_start())
    expected = {"parent": os.getpid(), "arguments": ["one", "two words"], "asked": "once", "input": ""}
    assert _reported(child) == expected
    assert child.output_tail(15) == "the last words"
    assert len(child.output_tail(4000)) == 1014
    assert _left(child) == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """The child processes of a test, in the order of their start."""
    found: list[ChildProcess] = []
    real = ChildProcess.__init__

    def note(child: ChildProcess, start: Start) -> None:
        real(child, start)
        found.append(child)

    monkeypatch.setattr(ChildProcess, "__init__", note)
    return found


def test_a_prestarted_process_is_taken_once(made: list[ChildProcess], prestarted: Prestarted) -> None:
    """The first request with equal parameters gets the process; the second gets a new one."""
    prestarted.prestart(_start())
    first, second = prestarted.take(_start()), prestarted.take(_start())
    prestarted.prestart(_start())
    third = prestarted.take(_start())
    assert made == [first, second, third]
    assert [_reported(child)["asked"] for child in made] == ["once"] * 3
    assert [_left(child) for child in made] == [0] * 3


def test_a_process_that_has_ended_is_not_taken(made: list[ChildProcess], prestarted: Prestarted) -> None:
    """A process that was killed, or that ended when idle, is replaced."""
    prestarted.prestart(_start())
    made[0].process.kill()
    made[0].process.wait()
    child = prestarted.take(_start())
    assert _reported(child)["asked"] == "once"
    assert made == [made[0], child]
    assert _left(child) == 0


def test_descendants_end_with_the_process(made: list[ChildProcess], prestarted: Prestarted) -> None:
    """A descendant, such as a compiler, is killed with the process."""
    prestarted.prestart(Start("tests.support.child_of_socket", ("has a child",), {"ASKED": ""}))
    child = Path(f"/proc/{_reported(made[0])['child']}")
    assert child.exists()
    prestarted.close()
    deadline = time.monotonic() + 120
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_awaited", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_an_estimate_takes_the_process_that_the_command_started(
    made: list[ChildProcess], prestarted: Prestarted, *, is_awaited: bool
) -> None:
    """The processes that the command prestarts are those that the estimate and the supervisor take."""
    early = EarlyProcesses(prestarted)
    entry.start_processes(["estimate", "spec.yaml"], early)
    entry.start_processes(["tune", "spec.yaml", "--device", "cpu"], early)
    with closing(tracing_server(prestarted.take)) as tracer, ProbeSupervisor(cpu(), prestarted.take) as supervisor:
        if is_awaited:
            supervisor.warm_up()
        assert [tracer.start(), supervisor._server.start()] == made


def test_a_process_started_with_other_parameters_is_ended(made: list[ChildProcess], prestarted: Prestarted) -> None:
    """A prestarted process with other parameters is ended, and a new one is started."""
    prestarted.prestart(_start("otherwise"))
    child = prestarted.take(_start())
    assert _reported(child)["asked"] == "once"
    assert [child.process.returncode for child in made] == [-signal.SIGKILL, None]
    prestarted.prestart(_start("unasked"))
    prestarted.close()
    assert made[-1].process.returncode == -signal.SIGKILL
    assert _left(child) == 0


def test_a_failed_prestart_is_reported_by_take(monkeypatch: pytest.MonkeyPatch, prestarted: Prestarted) -> None:
    """The failure is not raised by prestart, because the command may not need the process."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    prestarted.prestart(_start())
    with pytest.raises(FileNotFoundError):
        prestarted.take(_start())
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


_CPU, _CARD, _TRACING = fork_server("cpu"), fork_server("cuda"), tracing_worker()


@pytest.mark.parametrize(
    ("arguments", "without_cards", "with_cards"),
    [
        ("estimate spec.yaml --gpu H100-80GB", _TRACING, _TRACING),
        ("estimate spec.yaml --gpu T4 --engine virtual", None, None),
        ("estimate spec.yaml --engine=trace", _TRACING, _TRACING),
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
def test_the_command_prestarts_the_processes_it_needs(  # noqa: PLR0913, PLR0917 - fixtures and parameters
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prestarted: Prestarted,
    arguments: str,
    without_cards: Start | None,
    with_cards: Start | None,
) -> None:
    """The command's arguments, and whether the host has GPUs, decide what is prestarted."""
    begun: list[Start | None] = []
    monkeypatch.setattr(prestarted, "prestart", begun.append)
    monkeypatch.setattr(entry, "_CARDS", tmp_path / "gpus")
    early = EarlyProcesses(prestarted)
    entry.start_processes(arguments.split(), early)
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    entry.start_processes(arguments.split(), early)
    assert begun == [module for module in (without_cards, with_cards) if module is not None]


def test_prestarting_imports_almost_nothing() -> None:
    """Neither pydantic nor typer is imported, which takes longer than the start of a process."""
    code = "import sys, batchwright.cli.entry; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "typer", "rich", "yaml", "torch"} & set(modules)
