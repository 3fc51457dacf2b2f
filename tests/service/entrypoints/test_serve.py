"""The served process as a whole: killed, stopped, refused."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.client.documents.work import Event
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.entrypoints import serve as serve_module
from batchwright_service.entrypoints.serve import _listening, serve
from batchwright_service.errors import ConfigurationError, DeviceTakenError
from batchwright_service.settings import Settings
from tests.support.factories import recommendation, tuning_request
from tests.support.service.processes import (
    PATIENCE_SECONDS,
    Spoken,
    are_gone,
    children_of,
    slow_service,
    spoken,
    wait_until,
)
from tests.support.service.running import application
from tests.support.service.scripted import undisturbed

pytestmark = pytest.mark.usefixtures("starts")

PROBE_SECONDS = 0.25
START_SECONDS = 120.0

StartServed = Callable[..., Spoken]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return the file to which every started probe is written."""
    path = tmp_path / "probes.txt"
    path.touch()
    return path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data folder of ``shared``."""
    return tmp_path_factory.mktemp("shared") / "data"


@pytest.fixture(scope="module")
def shared(starts: None, shared_folder: Path) -> Iterator[Spoken]:
    """Return a served process for the tests that end nothing; requests differ, so that no answer is another's."""
    del starts
    journal = shared_folder.with_name("probes.txt")
    journal.touch()
    with slow_service(shared_folder, journal, PROBE_SECONDS) as served:
        yield served


@pytest.fixture
def start_served(tmp_path: Path, journal: Path) -> Iterator[StartServed]:
    """Starts served processes on one data folder, and kills what a test leaves."""
    with ExitStack() as stack:
        yield lambda port=0: stack.enter_context(slow_service(tmp_path / "data", journal, PROBE_SECONDS, port))


def sizes_in(journal: Path) -> list[int]:
    """The probes that were started, in order, over all processes."""
    return [int(line) for line in journal.read_text().split()]


def interrupted(sizes: list[int], expected: list[int]) -> bool:
    """Return whether no probe but one, the third or a later one, was started twice: the one that was killed.

    On a loaded machine the signal may come when the third has ended, or between two probes.
    """
    return any(sizes == expected[: place + 1] + expected[place:] for place in range(2, len(expected) + 1))


def wait_for_probes(client: Client, tuning_id: str, count: int) -> Event:
    """Follow a tuning until this many probes are recorded."""
    for event in client.tunings.events(tuning_id):
        if event.probe is not None and event.probe.ordinal == count:
            return event
    raise AssertionError


def test_a_killed_service_goes_on_from_its_recorded_probes(start_served: StartServed, journal: Path) -> None:
    """After kill -9 in the third probe the tuning ends as undisturbed: only the probe that was killed is run again."""
    expected = [probe.micro_batch_size for probe in undisturbed()]
    first = start_served()
    with Client(first.url) as client:
        tuning_id = client.tunings.submit(tuning_request()).id
        wait_for_probes(client, tuning_id, 2)
    deadline = time.monotonic() + START_SECONDS
    while len(sizes_in(journal)) < 3 and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = start_served()
    with Client(second.url) as client:
        tuning = client.tunings.wait(tuning_id, START_SECONDS)
        recorded = [probe.result.micro_batch_size for probe in client.tunings.probes(tuning_id)]
        states = [event.state for event in client.tunings.events(tuning_id) if event.state is not None]
    assert (tuning.state, tuning.attempts) == (State.SUCCEEDED, 2)
    assert recorded == expected
    assert interrupted(sizes_in(journal), expected)
    if states.count(State.QUEUED) == 2:  # its worker saw the end of the service in time, and handed it back
        states.pop(2)
    assert states == [State.QUEUED, State.RUNNING, State.RUNNING, State.SUCCEEDED]


def test_a_killed_worker_process_is_started_again(start_served: StartServed, journal: Path) -> None:
    """After kill -9 of it in the third probe the same service, which answers all the time, ends the tuning as usual."""
    expected = [probe.micro_batch_size for probe in undisturbed()]
    served = start_served()
    with Client(served.url) as client:
        tuning_id = client.tunings.submit(tuning_request()).id
        wait_for_probes(client, tuning_id, 2)
        wait_until(lambda: len(sizes_in(journal)) >= 3)
        (worker,) = children_of(served.process.pid)
        os.kill(worker, signal.SIGKILL)
        tuning = client.tunings.wait(tuning_id, START_SECONDS)
        recorded = [probe.result.micro_batch_size for probe in client.tunings.probes(tuning_id)]
    assert (tuning.state, tuning.attempts) == (State.SUCCEEDED, 2)
    assert recorded == expected
    assert interrupted(sizes_in(journal), expected)
    assert served.end(signal.SIGTERM) == 0
    assert any("killed by signal 9; restarting it" in line for line in served.lines)


@pytest.mark.thorough
def test_a_worker_process_that_is_told_to_end_hands_back_and_is_started_again(
    start_served: StartServed, journal: Path
) -> None:
    """SIGTERM to it alone ends its probe, and the next goes on with the tuning."""
    served = start_served()
    with Client(served.url) as client:
        tuning_id = client.tunings.submit(tuning_request()).id
        wait_for_probes(client, tuning_id, 1)
        (worker,) = children_of(served.process.pid)
        os.kill(worker, signal.SIGTERM)
        assert client.tunings.wait(tuning_id, START_SECONDS).state is State.SUCCEEDED
    assert sorted(set(sizes_in(journal))) == sorted([probe.micro_batch_size for probe in undisturbed()])


def test_a_group_that_is_terminated_gets_one_signal(start_served: StartServed, journal: Path) -> None:
    """A supervisor may signal every process of the service: a job still gets its grace, until the second signal."""
    served = start_served()
    with Client(served.url) as client:
        client.jobs.submit(recommendation(), TrainingRequest(updates=10))
        wait_until(lambda: client.devices.list()[0].running_id is not None)
    (worker,) = children_of(served.process.pid)
    for process in (served.process.pid, worker):
        os.kill(process, signal.SIGTERM)
    wait_until(lambda: sizes_in(journal) == [0])
    assert served.process.poll() is None
    assert served.end(signal.SIGTERM) == 0
    assert are_gone({worker})


def test_a_killed_service_takes_its_worker_process_along(start_served: StartServed) -> None:
    """Kill -9 of the one that serves the API leaves nothing behind, also where the worker process hangs."""
    served = start_served()
    below = children_of(served.process.pid)
    (worker,) = below
    os.kill(worker, signal.SIGSTOP)  # it does not see that its channel has ended
    served.end(signal.SIGKILL)
    wait_until(lambda: are_gone(below))


def test_the_metrics_of_a_worker_process_are_with_those_of_the_api(shared: Spoken) -> None:
    """One scrape has both, each family once; without a process they are the API's alone."""
    with Client(shared.url) as client, httpx.Client(base_url=shared.url, timeout=PATIENCE_SECONDS) as http:
        client.tunings.wait(client.tunings.submit(tuning_request()).id, START_SECONDS)
        text = http.get("/metrics").raise_for_status().text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert 'batchwright_tuning_seconds_count{outcome="succeeded",state="SUCCEEDED"} 1.0' in text
    assert 'batchwright_probes_total{device="cpu",outcome="FIT"}' in text
    assert 'batchwright_device_busy{device="cpu"} 0.0' in text
    assert "batchwright_http_request_seconds_count" in text


def test_a_worker_process_is_told_of_new_work(tmp_path: Path, journal: Path) -> None:
    """Work begins, although the worker polls once a day."""
    rarely = {"POLL_SECONDS": "86400"}
    with slow_service(tmp_path / "data", journal, 0.0, environment=rarely) as served, Client(served.url) as client:
        tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id, START_SECONDS)
    assert tuning.state is State.SUCCEEDED


def test_a_terminated_service_hands_back_and_exits_cleanly(start_served: StartServed, journal: Path) -> None:
    """SIGTERM ends followers and the running probe; the next service runs the rest."""
    first = start_served()
    with Client(first.url) as client:
        tuning_id = client.tunings.submit(tuning_request()).id
        wait_for_probes(client, tuning_id, 1)
    assert first.end(signal.SIGTERM) == 0
    assert not [line for line in first.lines if "Traceback" in line]
    second = start_served()
    with Client(second.url) as client:
        tuning = client.tunings.wait(tuning_id, START_SECONDS)
    assert tuning.state is State.SUCCEEDED
    assert sorted(set(sizes_in(journal))) == sorted([probe.micro_batch_size for probe in undisturbed()])
    assert second.end(signal.SIGINT) == 0


@pytest.mark.thorough
def test_a_second_signal_ends_a_service_faster(start_served: StartServed, journal: Path) -> None:
    """A job may take ten minutes to end itself after the first SIGTERM, and nothing more after the second."""
    served = start_served()
    with Client(served.url) as client:
        client.jobs.submit(recommendation(), TrainingRequest(updates=10))
        wait_until(lambda: client.devices.list()[0].running_id is not None)
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: sizes_in(journal) == [0])
    assert served.end(signal.SIGTERM) == 0  # within the patience, a fifth of the job's ten minutes


def test_a_follower_outlives_a_restart(start_served: StartServed) -> None:
    """The SDK's stream resumes after the last event it saw, without gap or repetition, on a service come back."""
    first = start_served()
    port = int(first.url.rpartition(":")[2])
    seen: list[Event] = []
    with Client(first.url) as client:
        tuning_id = client.tunings.submit(tuning_request()).id
        events = client.tunings.events(tuning_id)
        seen.extend(next(events) for _ in range(3))
        first.end(signal.SIGKILL)
        start_served(port)
        seen.extend(events)
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].state is State.SUCCEEDED


def test_a_running_probe_is_cancelled(shared: Spoken) -> None:
    """And the tuning with it; how soon is measured by `benchmarks/reaction_times.py`."""
    with Client(shared.url) as client:
        tuning_id = client.tunings.submit(tuning_request(effective_batch_size=64)).id
        wait_for_probes(client, tuning_id, 1)
        client.tunings.cancel(tuning_id)
        assert client.tunings.wait(tuning_id, START_SECONDS).state is State.CANCELLED


def test_answers_on_a_kept_connection_do_not_wait(tmp_path: Path) -> None:
    """The event loop sends on accepted connections without waiting for the acknowledgement of what it sent before."""

    async def accepted_without_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            found.set_result(option)
            writer.close()

        with _listening(Settings(data_dir=tmp_path, port=0)) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                with socket.create_connection(listener.getsockname()):
                    return await found

    assert asyncio.run(accepted_without_delay())


def test_the_service_is_not_opened_to_other_machines(tmp_path: Path) -> None:
    """Listening elsewhere than on loopback is refused while there is no API key."""
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0.*no API key yet"):
        serve(Settings(data_dir=tmp_path, host="0.0.0.0"))  # noqa: S104 - refused


@pytest.mark.usefixtures("shared")
def test_a_second_service_on_the_same_devices_is_refused(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the served device and its owner."""
    monkeypatch.setattr(serve_module, "app_of", application)
    with pytest.raises(DeviceTakenError, match="cpu is served by host:"):
        serve(Settings(data_dir=shared_folder, node_name="host", port=0, devices="cpu"))


def test_a_taken_port_is_named(shared: Spoken, tmp_path: Path) -> None:
    """Listening where someone listens already is refused in our words."""
    port = int(shared.url.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=str(port)):
        serve(Settings(data_dir=tmp_path / "other", port=port, devices="cpu"))


_STARTING = """
import os, signal, socket, sys
from dataclasses import replace
from pathlib import Path
from batchwright_service.bootstrap import build
from batchwright_service.errors import ServiceError
from batchwright_service.entrypoints.serve import serve_system
from batchwright_service.settings import Settings

other = socket.socket()
other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
other.bind(("127.0.0.1", 0))

class Workers:
    slots = []

    def start(self):
        if sys.argv[2] == "listen":
            other.listen()
        else:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))

    def request_stop(self): pass
    force_stop = request_stop

    def stop(self):
        print("handed back")

settings = Settings(data_dir=Path(sys.argv[1]), worker=False, port=other.getsockname()[1], log_level="error")
try:
    serve_system(settings, replace(build(settings), coordinator=Workers()))
except ServiceError as error:
    print(type(error).__name__, error)
"""
"""A service whose workers are slow to start; meanwhile another process listens on its port, or it gets a signal."""


def starting(tmp_path: Path, what: str) -> tuple[int, str, str]:
    """Start a service to which something happens meanwhile; return its exit status, and what it printed on both."""
    with spoken(["-c", _STARTING, str(tmp_path), what], "no such line", output=tmp_path / "output") as started:
        status = started.end()
    return status, (tmp_path / "output").read_text(), "".join(started.lines)


def test_a_port_that_is_taken_during_the_start_is_named(tmp_path: Path) -> None:
    """Two services that are started at once on one port: the second is refused in our words, and ends its workers."""
    status, printed, told = starting(tmp_path, "listen")
    assert "ConfigurationError cannot listen on 127.0.0.1 port" in printed
    assert "handed back" in printed
    assert (status, told) == (0, "")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_service_that_is_told_to_end_during_its_start_hands_back(tmp_path: Path, number: str) -> None:
    """Its workers may run something by then, which must not look as if they had vanished."""
    assert starting(tmp_path, number) == (0, "handed back\n", "")


_ORPHANING = """
import ctypes, json, os, subprocess, sys, time
from batchwright.system.processes import reap, zombies
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to this process, as to process 1
reading, writing = os.pipe()  # the orphan lives until it is closed here: its parent, which is gone, cannot wait for it
orphaning = "import subprocess, sys; subprocess.Popen(['cat'], stdin=int(sys.argv[1]))"
subprocess.run([sys.executable, "-c", orphaning, str(reading)], pass_fds=[reading], check=True)
os.close(reading)
os.close(writing)
while not (seen := zombies()):
    time.sleep(0.01)
own = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
reap(seen)
before = zombies()
own.communicate()
print(json.dumps([len(seen), len(before), own.returncode]))
"""


def test_orphans_do_not_stay_as_zombies() -> None:
    """Process 1 of a container inherits what a killed worker had started: it is waited for, and no other child is."""
    done = subprocess.run([sys.executable, "-c", _ORPHANING], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == [1, 0, 0]
