"""Work for a fleet, the service that dispatches it, and what must be true of it while parts are killed."""

import hashlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.service.processes import Api, Spoken, children_of, processes_with

PATIENCE_SECONDS = 600.0
_RUNS = re.compile(r"batchwright\0node\0run\0((?:tun|job)_\w+)")


class Dispatching:
    """A service with a dispatcher.

    Args:
        process: the API process.
        runs: the folder of the jobs' runs.
    """

    def __init__(self, process: Spoken, runs: Path) -> None:
        self.process = process
        self.api = Api(process.url)
        self._runs = runs

    def submit_tuning(self, width: int, **fields: object) -> str:
        """Queue a tuning of a small MLP, which no stored recommendation serves; its path."""
        architecture = {"name": "mlp", "input_features": 32, "hidden_features": width, "classes": 4}
        spec = {"model": {"kind": "reference", "architecture": architecture}, "data": {"kind": "synthetic"}}
        request = {"spec": spec, "effective_batch_size": 4096, "memory_limit_bytes": "48MiB", "fresh": True}
        return self.api.submit("/v1/tunings", request | fields)

    def submit_job(self, tuning: dict[str, Any], updates: int, **fields: int) -> str:
        """Queue a job of a tuning's recommendation; its path."""
        training = {"updates": updates, "checkpoint_every": 5} | fields
        return self.api.submit("/v1/jobs", {"recommendation_id": tuning["recommendation"]["id"], "training": training})

    def answer(self, path: str) -> object:
        """The end of a tuning or job, without what differs from run to run."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.api.get(path))["state"] not in {"SUCCEEDED", "FAILED", "CANCELLED"}:
            assert time.monotonic() < deadline, (found, self.api.get("/v1/fleet"))
            time.sleep(0.2)
        assert found["state"] == "SUCCEEDED", found
        if "/tunings/" in path:
            recommendation = found["recommendation"]
            return recommendation["largest_micro_batch_size"], recommendation["plan"]
        weights = sorted((self._runs / found["id"]).rglob("model*.safetensors"))
        assert weights, sorted((self._runs / found["id"]).rglob("*"))
        return hashlib.sha256(weights[-1].read_bytes()).hexdigest()

    def wait_for_devices(self, count: int) -> None:
        """Wait until a cluster's devices are announced and alive."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(device["alive"] for device in self.api.get("/v1/devices")["items"]) < count:
            assert time.monotonic() < deadline, self.api.get("/v1/fleet")
            time.sleep(0.2)

    def kill_worker(self) -> None:
        """Kill a worker that holds the lease of its work, once there is one."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (holders := [process for process, work in workers().items() if self._is_running(work)]):
            assert time.monotonic() < deadline, self.api.get("/v1/fleet")
            time.sleep(0.05)
        os.kill(holders[0], signal.SIGKILL)

    def _is_running(self, work: str) -> bool:
        kind = "tunings" if work.startswith("tun_") else "jobs"
        return bool(self.api.get(f"/v1/{kind}/{work}")["state"] == "RUNNING")

    def kill_dispatcher(self) -> None:
        """Kill the process of the dispatcher; the API starts another one."""
        kill_dispatcher_of(self.process.process.pid)


def kill_dispatcher_of(api: int) -> None:
    """Kill the dispatcher of an API process."""
    for process in children_of(api) & processes_with("batchwright_service.entrypoints.hosted_dispatcher"):
        os.kill(process, signal.SIGKILL)


def workers() -> dict[int, str]:
    """The processes that run a piece of work on a node, and which."""
    found: dict[int, str] = {}
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            match = _RUNS.search((folder / "cmdline").read_bytes().decode(errors="replace"))
            is_python = "python" in (folder / "exe").resolve().name
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if match is not None and is_python:
            found[int(folder.name)], parents[int(folder.name)] = match[1], parent
    return {process: work for process, work in found.items() if parents[process] not in found}  # none that was forked


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """The largest number of processes at once that ran each piece of work within the block."""
    most: Counter[str] = Counter()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most.update({work: max(0, n - most[work]) for work, n in Counter(workers().values()).items()})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
