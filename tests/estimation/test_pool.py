"""Estimates from a pool of processes, which are reused, replaced when lost, and never left over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from batchwright.errors import EstimateCancelledError, EstimateError, SpecError
from batchwright.estimation.client import tracing_server
from batchwright.estimation.pool import EstimatePool
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.fork_server.spawn import ChildProcess
from tests.support.factories import mlp_spec, transformers_spec

pytestmark = pytest.mark.usefixtures("tracing")

_STARTED = """
import time
from batchwright.estimation.pool import EstimatePool
with EstimatePool()._borrow() as server:
    print(server.start().process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def warm(tracing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EstimatePool]:
    """A pool without a compiler, which would take time."""
    del tracing
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", "/bin/false")
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = EstimatePool()
        yield found
        found.close()


@pytest.fixture(scope="module")
def first(warm: EstimatePool) -> Estimate:
    """The first estimate."""
    return _answer(warm)


def _request(spec: WorkloadSpec | None = None) -> EstimateRequest:
    return EstimateRequest(spec=spec or mlp_spec(), gpus=("A10G",))


def _answer(warm: EstimatePool) -> Estimate:
    return warm.estimate(_request()).model_copy(update={"seconds": 0.0})


def _waiting(warm: EstimatePool) -> list[int]:
    return [server.start().process.pid for server in warm._idle]


def test_the_second_estimate_comes_from_the_same_process(warm: EstimatePool, first: Estimate) -> None:
    """The process need not import torch again; `benchmarks/reaction_times.py` measures the time saved."""
    (pid,) = _waiting(warm)
    assert _answer(warm) == first
    assert _waiting(warm) == [pid]


@pytest.mark.usefixtures("first")
def test_an_invalid_request_costs_no_process(warm: EstimatePool) -> None:
    """An invalid field is reported, and the process stays for the next request."""
    (pid,) = _waiting(warm)
    with pytest.raises(SpecError, match="gpt3"):
        warm.estimate(_request(transformers_spec("causal-lm", {"model_type": "gpt3"}, batch={"sequence_length": 8})))
    assert _waiting(warm) == [pid]


def test_a_process_that_was_killed_is_replaced(warm: EstimatePool, first: Estimate) -> None:
    """The next request succeeds in a new process."""
    (pid,) = _waiting(warm)
    os.kill(pid, signal.SIGKILL)
    assert _answer(warm) == first
    assert _waiting(warm) != [pid]


@pytest.mark.usefixtures("first")
def test_a_cancelled_estimate_ends(warm: EstimatePool) -> None:
    """The fork that traces is killed; the process that has imported torch stays for the next request."""
    (pid,) = _waiting(warm)
    with pytest.raises(EstimateCancelledError):
        warm.estimate(_request(), lambda: True)
    assert _waiting(warm) == [pid]
    while Path(f"/proc/{pid}/task/{pid}/children").read_text():  # pytest's limit ends a wait in vain
        time.sleep(0.01)


def test_an_unknown_card_starts_no_process() -> None:
    """The name is refused in the calling process."""
    warm = EstimatePool()
    with pytest.raises(EstimateError, match="G-42"):
        warm.estimate(EstimateRequest(spec=mlp_spec(), gpus=("G-42",)))
    assert _waiting(warm) == []


def test_a_closed_pool_starts_no_process() -> None:
    """A service that shuts down leaves no process behind."""
    warm = EstimatePool()
    warm.close()
    with pytest.raises(EstimateCancelledError, match="shutting down"):
        warm.estimate(_request())


def test_an_idle_process_ends() -> None:
    """The process ends by itself after its idle time."""
    with closing(tracing_server(ChildProcess, idle_seconds=0.01)) as server:
        assert server.start().process.wait(60) == 0


def test_no_process_outlives_its_parent() -> None:
    """A parent that is killed by SIGKILL leaves no process behind."""
    parent = subprocess.Popen([sys.executable, "-c", _STARTED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        started = Path(f"/proc/{int(output.readline())}")
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while _runs(started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(started)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
