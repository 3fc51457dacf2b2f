"""Estimates from processes that stay: as quick and as right as they should be, replaced when lost, never left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.factories import mlp_spec, transformers_spec
from tuner.errors import EstimateCancelledError, EstimateError, SpecError
from tuner.estimation.client import tracing_server
from tuner.estimation.pool import WarmEstimates
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.workload import WorkloadSpec
from tuner.system.fork_server.spawn import ChildProcess

_STARTED = """
import time
from tuner.estimation.pool import WarmEstimates
with WarmEstimates()._taken() as server:
    print(server.start().process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmEstimates]:
    """Without a compiler, which would take its time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", "/bin/false")
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = WarmEstimates()
        yield found
        found.close()


@pytest.fixture(scope="module")
def first(warm: WarmEstimates) -> Estimate:
    """The first answer."""
    return _answer(warm)


def _request(spec: WorkloadSpec | None = None) -> EstimateRequest:
    return EstimateRequest(spec=spec or mlp_spec(), gpus=("A10G",))


def _answer(warm: WarmEstimates) -> Estimate:
    return warm.estimate(_request()).model_copy(update={"seconds": 0.0})


def _waiting(warm: WarmEstimates) -> list[int]:
    return [it.start().process.pid for it in warm._free]


def test_the_second_answer_comes_from_the_same_process(warm: WarmEstimates, first: Estimate) -> None:
    """Which need not import torch again; `benchmarks/reaction_times.py` measures what that saves."""
    (pid,) = _waiting(warm)
    assert _answer(warm) == first
    assert _waiting(warm) == [pid]


@pytest.mark.usefixtures("first")
def test_what_a_question_gets_wrong_costs_no_process(warm: WarmEstimates) -> None:
    """A wrong field comes back as one, and the process waits for the next question."""
    (pid,) = _waiting(warm)
    with pytest.raises(SpecError, match="gpt3"):
        warm.estimate(_request(transformers_spec("causal-lm", {"model_type": "gpt3"}, batch={"sequence_length": 8})))
    assert _waiting(warm) == [pid]


def test_a_process_that_was_killed_is_replaced(warm: WarmEstimates, first: Estimate) -> None:
    """Whoever asks next does not notice, but for the time it takes."""
    (pid,) = _waiting(warm)
    os.kill(pid, signal.SIGKILL)
    assert _answer(warm) == first
    assert _waiting(warm) != [pid]


@pytest.mark.usefixtures("first")
def test_what_is_given_up_ends(warm: WarmEstimates) -> None:
    """The fork that traces is killed; the process that has imported torch waits for the next question."""
    (pid,) = _waiting(warm)
    with pytest.raises(EstimateCancelledError):
        warm.estimate(_request(), lambda: True)
    assert _waiting(warm) == [pid]
    assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""


def test_an_unknown_card_starts_nothing() -> None:
    """The name is refused here."""
    warm = WarmEstimates()
    with pytest.raises(EstimateError, match="G-42"):
        warm.estimate(EstimateRequest(spec=mlp_spec(), gpus=("G-42",)))
    assert _waiting(warm) == []


def test_after_its_end_nothing_is_started() -> None:
    """A service that stops leaves no process behind."""
    warm = WarmEstimates()
    warm.close()
    with pytest.raises(EstimateCancelledError, match="ending"):
        warm.estimate(_request())


def test_a_process_that_nobody_asks_ends() -> None:
    """After its time, by itself."""
    with closing(tracing_server(ChildProcess, idle_seconds=0.01)) as server:
        assert server.start().process.wait(60) == 0


def test_no_process_outlives_whoever_asks() -> None:
    """Killed by -9, as a service may be, it leaves none."""
    asking = subprocess.Popen([sys.executable, "-c", _STARTED], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    with asking.stdout as told:
        started = Path(f"/proc/{int(told.readline())}")
    asking.kill()
    asking.wait()
    deadline = time.monotonic() + 60
    while _runs(started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(started)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
