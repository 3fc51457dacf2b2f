"""What the service's reads take with many rows stored, beside a bare FastAPI route that returns the same bytes.

python benchmarks/api_load.py [--rounds 5] [--seconds 2] [--output benchmarks/results/api_load.json]

Reading a recommendation, and listing 50 tunings (one of sixteen pages), with 1,000, 10,000 and 100,000 tunings and
recommendations stored; then, with all of them, while 1,000 followers hold an event stream each of as many tunings that
wait, and with an API key. Both servers are one process of uvicorn with the same settings. They are read in turns, a
slice of some seconds each, by one process with 16 connections: a ratio compares neighbouring slices.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from api_load_rows import Rows, in_turn
from reporting import HERE, forget_settings, measured_here, new_parser, print_head, print_row, write_result

from batchwright.client.documents.api_keys import Scope
from batchwright_service.domain.key_texts import make_key
from batchwright_service.store.store import open_store
from tests.support.service.processes import LISTENS, Spoken, spoken

SIZES = (1_000, 10_000, 100_000)
CONNECTIONS = 16
FOLLOWERS = 1_000
LEAST_RATIO = {"recommendation": 0.33, "list": 0.15}
"""Of the bare route's requests per second."""
LARGEST_SPREAD = 20.0
"""Of the 99th percentile over the median."""
LEAST_FLATNESS = 0.8
"""Of requests per second with the most rows over those with the fewest."""
_DIFFERENT_PATHS = 1_000
_PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy")


@dataclass
class Load:
    """Reads one server at a time."""

    folder: Path
    seconds: float
    key: str | None = None

    def read(self, port: int, paths: list[str]) -> dict[str, float]:
        """One slice.

        Raises:
            RuntimeError: when a request was not answered with 200.
        """
        listed = self.folder / "paths.txt"
        listed.write_text("\n".join(paths) + "\n")
        key = {"BATCHWRIGHT_API_KEY": self.key} if self.key else {}
        environment = {**os.environ, **key}
        client = [sys.executable, str(HERE / "api_load_client.py"), "read", str(port), str(CONNECTIONS)]
        command = [*client, str(self.seconds), str(listed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - ours
        found: dict[str, float] = json.loads(done.stdout)
        if found["refused"]:
            raise RuntimeError(f"{found['refused']} of {found['requests']} requests for {paths[0]} were refused")
        return found


def port_of(server: Spoken) -> int:
    """The port of a server that listens on this machine."""
    return int(server.url.rpartition(":")[2])


@contextmanager
def followed(folder: Path, port: int, tunings: list[str]) -> Iterator[dict[str, int]]:
    """A follower on each tuning's event stream; what they say at the end is in the mapping afterwards."""
    listed = folder / "followed.txt"
    listed.write_text("\n".join(f"/v1/tunings/{it}/events" for it in tunings) + "\n")
    command = [sys.executable, str(HERE / "api_load_client.py"), "follow", str(port), str(listed)]
    said: dict[str, int] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
        assert process.stdout is not None
        if process.stdout.readline() != "following\n":
            raise RuntimeError("the followers cannot follow")
        yield said
        said.update(json.loads(process.communicate("")[0]))


@dataclass
class Pair:
    """The two servers, and what is read of them."""

    load: Load
    ours: int
    bare: int
    rounds: int

    def compare(self, what: str, paths: list[str]) -> dict[str, Any]:
        """Slices in turns, and the figures over them."""
        slices: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
        for number in range(self.rounds):
            turn = [("ours", self.ours), ("bare", self.bare)]
            for name, port in turn if number % 2 else reversed(turn):
                slices[name].append(self.load.read(port, paths))
        ratios = [
            one["requests_per_second"] / other["requests_per_second"]
            for one, other in zip(slices["ours"], slices["bare"], strict=True)
        ]
        figures = {name: _medians(found) for name, found in slices.items()}
        return {"what": what, **figures, "ratio": round(statistics.median(ratios), 3), "ratios": ratios}


def _medians(slices: list[dict[str, float]]) -> dict[str, float]:
    names = ("requests_per_second", "p50_ms", "p99_ms")
    medians = {name: round(statistics.median(it[name] for it in slices), 3) for name in names}
    return medians | {"p99_over_p50": round(max(it["p99_ms"] / it["p50_ms"] for it in slices), 2)}


def measured(pair: Pair, rows: Rows, folder: Path, url: str) -> Iterator[dict[str, Any]]:
    """A row of the table for every situation and each of the two reads."""
    paths: dict[str, list[str]] = {}
    for size in SIZES:
        rows.grow_to(size)
        paths = reads(rows, pair.ours)
        for what, asked in paths.items():
            yield {"rows": size, **pair.compare(what, asked)}
    waiting = rows.add_waiting(FOLLOWERS)
    with followed(folder, pair.ours, waiting) as said:
        beside = [{"rows": SIZES[-1], "followers": FOLLOWERS, **pair.compare(*it)} for it in paths.items()]
    yield from (row | said for row in beside)
    pair.load.key = new_key(url)
    for what, asked in paths.items():
        yield {"rows": SIZES[-1], "key": True, **pair.compare(what, asked)}


def reads(rows: Rows, port: int) -> dict[str, list[str]]:
    """The paths of each kind of read: different ones, so that none is answered from another's."""
    chosen = in_turn(rows.recommendation_ids, _DIFFERENT_PATHS)
    return {"recommendation": [f"/v1/recommendations/{it}" for it in chosen], "list": list(pages(port))}


def pages(port: int) -> Iterator[str]:
    """The first pages of the list of tunings."""
    path = "/v1/tunings?limit=50"
    for _ in range(CONNECTIONS):
        yield path
        page = httpx.get(f"http://127.0.0.1:{port}{path}").raise_for_status().json()
        path = f"/v1/tunings?limit=50&cursor={page['next_cursor']}"


def new_key(url: str) -> str:
    """A key that may read; from now on the service wants one."""
    store = open_store(url)
    made, text = make_key("load", (Scope.TUNINGS_READ,))
    store.keys.add(made)
    store.close()
    return text


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of the targets are met."""
    few, many = (
        {row["what"]: row for row in rows if row["rows"] == size and not row.keys() & {"followers", "key"}}
        for size in (SIZES[0], SIZES[-1])
    )
    found = {
        f"{what}: at least {least:g} of the bare route": many[what]["ratio"] >= least
        for what, least in LEAST_RATIO.items()
    }
    flat = [many[what]["ratio"] / few[what]["ratio"] for what in many]  # against the bare route: so the machine cancels
    followers = [row for row in rows if "followers" in row]
    return found | {
        f"p99 below {LARGEST_SPREAD:g} x p50": all(row["ours"]["p99_over_p50"] < LARGEST_SPREAD for row in rows),
        f"flat from {SIZES[0]} to {SIZES[-1]} rows": min(flat) >= LEAST_FLATNESS,
        f"{FOLLOWERS} followers held": all(row["still_open"] == FOLLOWERS for row in followers),
    }


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    beside = "followers" * ("followers" in row) + "key" * ("key" in row)
    ours, bare = row["ours"], row["bare"]
    cells = [row["rows"], beside or "-", row["what"], ours["requests_per_second"], bare["requests_per_second"]]
    print_row(*cells, row["ratio"], ours["p50_ms"], ours["p99_ms"], bare["p50_ms"], bare["p99_ms"])


@contextmanager
def prepared(folder: Path, load: Load, rounds: int) -> Iterator[tuple[Pair, Rows, str]]:
    """Both servers running, and some rows stored."""
    url = f"sqlite:///{folder / 'load.db'}"
    settings = {"BATCHWRIGHT_DATA_DIR": str(folder / "data"), "BATCHWRIGHT_DEVICES": "cpu"}
    open_store(url).close()
    rows = Rows(url)
    rows.grow_to(SIZES[0])
    with ExitStack() as stack:
        stack.callback(rows.close)
        serve = ["-m", "batchwright", "serve", "--port", "0", "--database-url", url]
        ours = port_of(stack.enter_context(spoken(serve, LISTENS, settings)))
        files = []
        for what, paths in reads(rows, ours).items():
            files.append(folder / f"{what}.json")
            files[-1].write_bytes(httpx.get(f"http://127.0.0.1:{ours}{paths[0]}").raise_for_status().content)
        bare = port_of(stack.enter_context(spoken([str(HERE / "api_load_bare.py"), *map(str, files)], LISTENS)))
        for port in (ours, bare):
            load.read(port, ["/v1/tunings?limit=50"])  # warm
        yield Pair(load, ours, bare, rounds), rows, url


def main() -> None:
    """Run, print, write; exit status 1 when a target is missed."""
    parser = new_parser(__doc__, "api_load.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of one slice")
    options = parser.parse_args()
    forget_settings()
    names = ("rows", "beside", "read", "ours /s", "bare /s", "ratio", "ours p50", "p99, ms", "bare p50", "p99, ms")
    print_head(*names)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="api-load-") as name:
        load = Load(Path(name), options.seconds)
        with prepared(Path(name), load, options.rounds) as (pair, stored, url):
            for row in measured(pair, stored, Path(name), url):
                show(row)
                rows.append(row)
            sizes = {what: (Path(name) / f"{what}.json").stat().st_size for what in LEAST_RATIO}
    figures = {
        "connections": CONNECTIONS,
        "slice_seconds": options.seconds,
        "rounds": options.rounds,
        "body_bytes": sizes,
        "targets": verdicts(rows),
        "rows": rows,
    }
    write_result(options.output, measured_here(*_PACKAGES) | figures)
    print(json.dumps(verdicts(rows), indent=1))
    sys.exit(not all(verdicts(rows).values()))


if __name__ == "__main__":
    main()
