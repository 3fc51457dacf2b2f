"""Load on a service by unauthenticated clients: half requests, half sign-ins, bodies of many keys, no reading.

python benchmarks/unauthenticated_clients.py [--output benchmarks/results/unauthenticated_clients.json]

Four rounds, each on a service of its own on loopback, as `batchwright serve` runs it on the CPU:

- with 256 descriptors, 600 connections that never finish a request, while two tunings run and a client asks `/livez`;
- 300 sign-ins that send all of 1 MiB but the last byte, without an account;
- a body of 80,000 unknown keys, while a client asks `/livez`;
- 100 clients that ask for the API's document and read nothing of it, until they are dropped.
"""

import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from reporting import forget_settings, measured_here, new_parser, wait_until, write_result

from tests.support.factories import tuning_request
from tests.support.service.processes import LISTENS, Spoken, spoken

DESCRIPTORS = 256
HALF_REQUESTS = 600
HALF_SIGN_INS = 300
KEYS = 80_000
NOT_READING = 100
LONGEST_LIVEZ_SECONDS = 1.0
LARGEST_LOG_BYTES = 1024**2
LARGEST_RESIDENT_BYTES = 150 * 1024**2
_PATIENCE_SECONDS = 300.0
_UNREAD_SECONDS = 30.0
_FORM = "application/x-www-form-urlencoded"
_LIMITED = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


@dataclass(frozen=True)
class Served:
    """A service that runs."""

    process: Spoken

    @property
    def url(self) -> str:
        """Its address."""
        return self.process.url

    @property
    def log_bytes(self) -> int:
        """Size of the service's log."""
        return sum(map(len, self.process.lines))

    @property
    def descriptors(self) -> int:
        """Open files of the process that serves the API."""
        return len(list(Path(f"/proc/{self.process.process.pid}/fd").iterdir()))

    def resident_bytes(self, field: str = "VmRSS") -> int:
        """Memory of the process that serves the API."""
        found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{self.process.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def served(descriptors: int = 4096) -> Iterator[Served]:
    """A service; ended with the block."""
    command = ["-c", _LIMITED, str(descriptors), "-m", "batchwright", "serve", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="unauthenticated-") as folder:
        environment = {"BATCHWRIGHT_DATA_DIR": folder, "BATCHWRIGHT_DEVICES": "cpu"}
        with spoken(command, LISTENS, environment) as process:
            yield Served(process)


class Watch:
    """Asks `/livez` on new connections for as long as a block lasts, and notes how long each answer took."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self.failed = 0
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            began = time.monotonic()
            try:
                httpx.get(f"{self._url}/livez", timeout=_PATIENCE_SECONDS).raise_for_status()
            except httpx.HTTPError:
                self.failed += 1
            self.seconds.append(time.monotonic() - began)

    @property
    def figures(self) -> dict[str, float | int]:
        """How many answers, failures among them, and how long the slowest took."""
        longest = round(max(self.seconds), 3)
        return {"livez": len(self.seconds), "livez_failed": self.failed, "livez_longest_seconds": longest}


def connected(url: str, sent: bytes) -> socket.socket:
    """A connection on which all was sent that the service takes."""
    address = httpx.URL(url)
    opened = socket.create_connection((address.host, address.port or 0), timeout=30.0)
    with suppress(OSError):  # refused meanwhile, as it should be
        opened.sendall(sent)
    return opened


def half_requests() -> dict[str, Any]:
    """Connections that never finish a request, beside work."""
    half = b"POST /v1/tunings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
    with served(DESCRIPTORS) as service, ExitStack() as stack, Watch(service.url) as watch:
        for _ in range(HALF_REQUESTS):
            stack.enter_context(connected(service.url, half))
        states = [_tuned(service.url, batch) for batch in (100, 101)]
        descriptors, log = service.descriptors, service.log_bytes
    figures = {"half_requests": HALF_REQUESTS, "descriptors": DESCRIPTORS, "descriptors_used": descriptors}
    met = watch.figures["livez_longest_seconds"] < LONGEST_LIVEZ_SECONDS and not watch.failed
    met = met and states == ["SUCCEEDED"] * 2 and log < LARGEST_LOG_BYTES
    return {**figures, **watch.figures, "tunings": states, "log_bytes": log, "met": met}


def _tuned(url: str, effective_batch_size: int) -> str:
    """The state in which a small tuning ends."""
    document = tuning_request().model_dump(mode="json")
    document |= {"memory_limit_bytes": 2**28, "device": "cpu", "effective_batch_size": effective_batch_size}
    with httpx.Client(base_url=url, timeout=_PATIENCE_SECONDS) as http:
        made = http.post("/v1/tunings", json=document).raise_for_status().json()
        while (found := http.get(f"/v1/tunings/{made['id']}", params={"wait": 30}).json())["ended_at"] is None:
            pass
    return str(found["state"])


def half_sign_ins() -> dict[str, Any]:
    """Sign-ins that never end, and hold what they have sent."""
    head = f"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {_FORM}\r\nContent-Length: {1024**2}\r\n\r\n"
    sent = head.encode() + b"key=" + b"x" * (1024**2 - 5)
    with served() as service, ExitStack() as stack:
        before = service.resident_bytes()
        for _ in range(HALF_SIGN_INS):
            stack.enter_context(connected(service.url, sent))
        httpx.get(f"{service.url}/livez", timeout=30.0).raise_for_status()
        after, most = service.resident_bytes(), service.resident_bytes("VmHWM")
    figures = {"half_sign_ins": HALF_SIGN_INS, "resident_before": before, "resident_after": after}
    return {**figures, "resident_most": most, "met": most < LARGEST_RESIDENT_BYTES}


def many_keys() -> dict[str, Any]:
    """A body of unknown keys: its answer, and the others' meanwhile."""
    body = b"{" + b",".join(b'"%x":0' % number for number in range(KEYS)) + b"}"
    with served() as service, Watch(service.url) as watch:
        began = time.monotonic()
        answer = httpx.post(
            f"{service.url}/v1/tunings", content=body, headers={"Content-Type": "application/json"}, timeout=60.0
        )
        seconds = round(time.monotonic() - began, 3)
    figures = {"keys": KEYS, "status": answer.status_code, "answer_bytes": len(answer.content), "seconds": seconds}
    met = watch.figures["livez_longest_seconds"] < LONGEST_LIVEZ_SECONDS and len(answer.content) < 10_000
    return {**figures, **watch.figures, "met": met}


def not_reading() -> dict[str, Any]:
    """Clients that ask for more than the kernel takes and read nothing."""
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 40
    with served() as service, ExitStack() as stack:
        idle = service.descriptors
        for _ in range(NOT_READING):
            stack.enter_context(connected(service.url, asked))
        time.sleep(1.0)
        held = service.descriptors - idle
        began = time.monotonic()
        wait_until(lambda: service.descriptors <= idle + 5, 3 * _UNREAD_SECONDS, 0.5)
        left = service.descriptors - idle
    seconds = round(time.monotonic() - began, 1)
    return {"not_reading": NOT_READING, "held": held, "left": left, "dropped_seconds": seconds, "met": left <= 5}


def main() -> None:
    """Run, print, write; exit status 1 when a target is missed."""
    parser = new_parser(__doc__, "unauthenticated_clients.json")
    options = parser.parse_args()
    forget_settings()
    rounds: dict[str, dict[str, Any]] = {}
    for act in (half_requests, half_sign_ins, many_keys, not_reading):
        rounds[act.__name__] = act()
        print(act.__name__, json.dumps(rounds[act.__name__]), flush=True)
    write_result(options.output, {"machine": measured_here("uvicorn"), "rounds": rounds})
    sys.exit(not all(found["met"] for found in rounds.values()))


if __name__ == "__main__":
    main()
