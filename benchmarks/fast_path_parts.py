"""Measure what each part of `batchwright_service.fast_path` gains: reads with all parts, and without each of them.

python benchmarks/fast_path_parts.py [--rounds 8] [--seconds 0.5] [--output benchmarks/results/fast_path_parts.json]

For every kind of read there is a server with all parts, one without each part, and the bare route of `api_load.py`.
Each is read in turn with the server that has all parts, a short slice each, with 16 connections and 10,000 tunings
stored. The gain of a part is the CPU time of the server's process per request without the part over that with all
parts: the median and quartiles of the ratios of neighbouring slices, which other load of the machine disturbs least.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from api_load import Load, new_key, pages, port_of, reads
from api_load_rows import Rows
from pydantic_core import to_json
from reporting import (
    HERE,
    forget_settings,
    measured_here,
    new_parser,
    print_head,
    print_row,
    process_seconds,
    write_result,
)
from starlette.concurrency import run_in_threadpool

from batchwright.cli.main import main as batchwright
from batchwright_service.auth.api_keys import KeyAuthenticator
from batchwright_service.fast_path.coalescing import BatchedReads, CoalescedReads
from batchwright_service.fast_path.queue_positions import QueuePositions
from batchwright_service.fast_path.trusted_callers import TrustedCallers
from batchwright_service.store.database import mapping
from batchwright_service.store.database.transactions import read_transaction
from batchwright_service.store.models import EVERYTHING, WorkRow
from batchwright_service.store.store import open_store
from batchwright_service.store.work_queries import Listing, WorkStore
from tests.support.service.processes import LISTENS, spoken

ROWS = 10_000
WAITING = 100
LEAST_REQUESTS = 100
ALL, BARE = "all parts", "bare route"


async def _read_key(reads: Any, key: Any) -> Any:  # noqa: ANN401 - of any kind
    return (await run_in_threadpool(reads._read, [key])).get(key)  # noqa: SLF001


async def _read_one(reads: Any, key: Any) -> Any:  # noqa: ANN401 - of any kind
    return await run_in_threadpool(reads._read, key)  # noqa: SLF001


def _newest(store: Any, kind: Any, limit: int, before: Any = None, wanted: Any = EVERYTHING) -> list[WorkRow]:  # noqa: ANN401
    with read_transaction(store._engine) as connection:  # noqa: SLF001
        return [mapping.work_row(row) for row in Listing(kind, limit, before, wanted).rows(connection)]


PARTS: dict[str, list[tuple[Any, str, Any]]] = {
    "coalescing": [(BatchedReads, "get", _read_key), (CoalescedReads, "get", _read_one)],
    "row cache": [(WorkStore, "newest", _newest)],
    "rows as JSON": [(WorkRow, "summary_json", property(lambda row: to_json(row.summary())))],
    "queue positions": [(QueuePositions, "_is_fresh", lambda *_: False)],
    "trusted callers": [(TrustedCallers, "find", lambda *_: None)],
    "known absence of keys": [(KeyAuthenticator, "_keys_known_absent", lambda _: False)],
}
"""The parts, and the replacements in a server without them."""
READS = {
    "recommendation": ("coalescing", "known absence of keys"),
    "list": ("coalescing", "row cache", "rows as JSON"),
    "one list": ("coalescing",),
    "waiting tuning": ("coalescing", "queue positions"),
    "recommendation with a key": ("trusted callers",),
}
"""The parts that each kind of read passes through."""


@dataclass
class Servers:
    """A server of each kind, started when it is first needed."""

    folder: Path
    url: str
    files: list[Path]
    stack: ExitStack
    found: dict[str, tuple[int, int]] = field(default_factory=dict)

    def get(self, name: str) -> tuple[int, int]:
        """Return the port and the process of a server."""
        if name not in self.found:
            command = [str(HERE / "fast_path_parts.py"), "serve", name, self.url]
            if name == BARE:
                command = [str(HERE / "api_load_bare.py"), *map(str, self.files)]
            settings = {"BATCHWRIGHT_DATA_DIR": str(self.folder / name)}
            server = self.stack.enter_context(spoken(command, LISTENS, settings))
            self.found[name] = port_of(server), server.process.pid
        return self.found[name]


def measured(servers: Servers, load: Load, paths: list[str], names: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Read each server in turn with the one that has all parts, and compare."""
    for name in (ALL, *names):
        load.read(servers.get(name)[0], paths)  # warm
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name, found in pairs.items():
            turn = (name, ALL) if number % 2 else (ALL, name)
            found.append({server: _cpu_of_request(servers.get(server), load, paths) for server in turn})
    return {name: _compared([(pair[name], pair[ALL]) for pair in found]) for name, found in pairs.items()}


def _cpu_of_request(server: tuple[int, int], load: Load, paths: list[str]) -> float:
    """Return the CPU seconds that a request takes, over one slice, or several where other work starves the server."""
    port, pid = server
    began, requests = process_seconds(pid), 0.0
    while requests < LEAST_REQUESTS:
        requests += load.read(port, paths)["requests"]
    return (process_seconds(pid) - began) / requests


def _compared(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    lower, median, upper = statistics.quantiles((without / whole for without, whole in pairs), n=4)
    return {
        "cpu_ms": round(1000 * statistics.median(without for without, _ in pairs), 3),
        "cpu_ms_of_all_parts": round(1000 * statistics.median(whole for _, whole in pairs), 3),
        "cpu_ratio": round(median, 2),
        "cpu_ratio_quartiles": [round(lower, 2), round(upper, 2)],
    }


def rows_of(options: argparse.Namespace, folder: Path, stack: ExitStack) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of every kind of read."""
    url = f"sqlite:///{folder / 'load.db'}"
    open_store(url).close()
    stored = Rows(url)
    stack.callback(stored.close)
    stored.grow_to(ROWS)
    servers = Servers(folder, url, [folder / "recommendation.json", folder / "list.json"], stack)
    port = servers.get(ALL)[0]
    paths = reads(stored, port)
    for file, given in zip(servers.files, paths.values(), strict=True):
        file.write_bytes(httpx.get(f"http://127.0.0.1:{port}{given[0]}").raise_for_status().content)
    paths["one list"] = list(pages(port))[:1]
    load = Load(folder, options.seconds)
    for what, parts in READS.items():
        if what == "waiting tuning":
            paths[what] = [f"/v1/tunings/{identifier}" for identifier in stored.add_waiting(WAITING)]
        if what == "recommendation with a key":
            paths[what], load.key = paths["recommendation"], new_key(url)
        names = parts if what == "waiting tuning" else (BARE, *parts)  # which the bare application does not have
        yield what, measured(servers, load, paths[what], names, options.rounds)


def main() -> None:
    """Serve without one part, or measure all of them."""
    if sys.argv[1:2] == ["serve"]:
        name, url = sys.argv[2:]
        for owner, attribute, replacement in PARTS.get(name, []):
            setattr(owner, attribute, replacement)
        sys.argv[1:] = ["serve", "--no-worker", "--port", "0", "--database-url", url]
        batchwright()
        return
    parser = new_parser(__doc__, "fast_path_parts.json")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one slice")
    options = parser.parse_args()
    forget_settings()
    rows: dict[str, Any] = {}
    print_head("read", "without", "CPU, ms", "with all parts", "CPU ratio", "quartiles")
    with tempfile.TemporaryDirectory(prefix="fast-path-") as folder, ExitStack() as stack:
        for what, found in rows_of(options, Path(folder), stack):
            rows[what] = found
            for name, figures in found.items():
                print_row(what, name, *figures.values())
    document = measured_here() | {"rounds": options.rounds, "slice_seconds": options.seconds, "rows": rows}
    write_result(options.output, document)


if __name__ == "__main__":
    main()
