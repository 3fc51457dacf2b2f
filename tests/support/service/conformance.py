"""Tools of others against a running service: what the tests and ``make conformance`` share."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from batchwright.client.documents.api_keys import Scope
from batchwright_service.domain.key_texts import make_key
from batchwright_service.settings import Settings
from batchwright_service.store.store import open_store
from tests.support.paths import ROOT, SUPPORT
from tests.support.service.generated_clients import EFFECTIVE_BATCH_SIZE, MEMORY_LIMIT_BYTES, PACKAGE

HERE = SUPPORT / "service"
DOCUMENT = ROOT / "openapi" / "openapi.json"
_START_SECONDS = 180.0


@dataclass(frozen=True)
class Service:
    """A service that runs, and a key that may do everything; none when it has no keys."""

    url: str
    key: str | None


@contextmanager
def started(command: Sequence[str], folder: Path, *, keys: bool) -> Iterator[Service]:
    """A service on a new data folder and a free port, which is appended to the command; ended with the block."""
    settings = Settings(data_dir=folder / "data")
    key = _new_key(settings.url) if keys else None
    environment = _environment(BATCHWRIGHT_DATA_DIR=str(settings.data_dir), OMP_WAIT_POLICY="PASSIVE")
    log = folder / "service.log"
    with log.open("wb") as output, subprocess.Popen([*command, "0"], env=environment, stderr=output) as process:
        try:
            yield Service(_address(process, log), key)
        finally:
            process.terminate()


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


def _new_key(url: str) -> str:
    store = open_store(url)
    new, text = make_key("conformance", (Scope.ADMIN,))
    store.keys.add(new)
    store.close()
    return text


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return its address, after the process has printed it.

    Raises:
        RuntimeError: with what it said instead.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listens on (http://\S+)", log.read_text()):
            return found[1].rstrip('",}')
        time.sleep(0.02)
    raise RuntimeError(f"the service did not start:\n{log.read_text()}")


def real_service() -> list[str]:
    """The command of the real service, on the devices of this machine, but for its port."""
    return [sys.executable, "-m", "batchwright", "serve", "--port"]


def scripted_service(folder: Path) -> list[str]:
    """The command of a service whose probes are scripted, but for its port."""
    return [sys.executable, str(HERE / "conformance_service.py"), str(folder / "data")]


# --- schemathesis -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fuzzed:
    """The findings of schemathesis."""

    cases: int
    failures: int
    phases: dict[str, str]
    """The status of each phase it went through."""
    output: str


def fuzz(service: Service, folder: Path, *, key: str | None, arguments: Sequence[str] = ()) -> Fuzzed:
    """Every operation of the document that the service itself serves, with every check, as who has ``key``.

    Raises:
        RuntimeError: when it did not come to an end.
    """
    report = folder / "schemathesis.json"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(ROOT / "schemathesis.toml"), "run"]
    options = ["--continue-on-failure", "--checks", "all", "--report-json-path", str(report)]
    if key is not None:
        options += ["--header", f"Authorization: Bearer {key}"]
    if service.key is None:
        options += ["--exclude-checks", "ignored_auth"]  # a service without keys asks nobody who they are
    done = subprocess.run(
        [*command, f"{service.url}/openapi.json", *options, *arguments],
        env=_environment(PYTHONWARNINGS="ignore"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    if not found.get("complete"):
        raise RuntimeError(f"schemathesis did not come to its end:\n{output[-4000:]}")
    cases = found["test_cases"]
    phases = {name: str(phase["status"]) for name, phase in (found["phases"] or {}).items()}
    wrong = cases["with_failures"] + sum(error["count"] for error in found["errors"])
    return Fuzzed(cases["generated"], wrong, phases, output)


# --- generated clients ------------------------------------------------------------------------------------------------


def generate_by_openapi_python_client(folder: Path) -> None:
    """Make the package of ``openapi-python-client`` in a folder.

    Raises:
        RuntimeError: when the generator warns: then something of the document is missing in the client.
    """
    config = folder / "config.yml"
    config.write_text("post_hooks: []\n")
    target = ["--path", str(DOCUMENT), "--output-path", str(folder / PACKAGE), "--meta", "none"]
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--config", str(config), *target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "warning" in done.stdout.lower():
        raise RuntimeError(f"openapi-python-client:\n{done.stdout}{done.stderr}")


def complete_a_tuning(python: str, generator: str, folder: Path, service: Service) -> dict[str, Any]:
    """Return the tuning that the client in ``folder`` completes; its plan adds up to the effective batch.

    Raises:
        RuntimeError: when the client fails, the plan does not add up, or the memory limit is not the one sent as text.
    """
    key = {"BATCHWRIGHT_API_KEY": service.key} if service.key else {}
    environment = _environment(PYTHONWARNINGS="ignore", **key) | {"PYTHONPATH": str(folder)}
    command = [python, str(HERE / "generated_clients.py"), generator, service.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the client by {generator}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    planned = sum(sum(rank) for rank in found["micro_batch_sizes"])
    adds_up = planned == found["effective_batch_size"] == EFFECTIVE_BATCH_SIZE
    if found["state"] != "SUCCEEDED" or not adds_up or found["memory_limit_bytes"] != MEMORY_LIMIT_BYTES:
        raise RuntimeError(f"the client by {generator} found {found}")
    return found


def metrics(service: Service) -> str:
    """Return the metrics of the service.

    Raises:
        httpx.HTTPError: when it does not.
    """
    headers = {"Authorization": f"Bearer {service.key}"} if service.key else {}
    return httpx.get(f"{service.url}/metrics", headers=headers).raise_for_status().text
