"""How soon a service reacts: to cancellations, a dead worker, waiting writers, a browser, and a second estimate.

python benchmarks/reaction_times.py [--rounds 5] [--output benchmarks/results/reaction_times.json]

No test depends on these figures: on a busy machine they are larger. Probes are scripted; everything else is real.
"""

import json
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from reporting import measured_here, new_parser, write_result
from sqlalchemy import text

from batchwright.estimation.pool import EstimatePool
from batchwright.schemas.estimates import EstimateRequest
from batchwright_service.store.database.schema import work_items
from batchwright_service.store.database.transactions import open_engine, write_transaction
from tests.support.factories import mlp_spec, tuning_request
from tests.support.paths import SUPPORT
from tests.support.service.browser import chromium, watched
from tests.support.service.processes import LISTENS, WORKS, Api, Spoken, spoken, wait_until
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer

LEASE_SECONDS = 2.0
WRITERS, WRITES = 6, 50
MANY = 10_000
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
REACTION = """async () => {
    const began = performance.now();
    document.querySelector("tbody tr:last-child").scrollIntoView();
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - began;
}"""


def seconds_of(call: Callable[[], object]) -> float:
    """The time that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def several_processes(folder: Path) -> Iterator[tuple[Api, Callable[[str], Spoken], Callable[[str], list[str]]]]:
    """An API in a process of its own; what starts a worker beside it; the probes that a worker has begun."""
    url = f"sqlite:///{folder / 'shared.db'}"
    command = ["-m", "batchwright", "serve", "--no-worker", "--port", "0", "--database-url", url]
    environment = {"BATCHWRIGHT_DATA_DIR": str(folder / "api"), "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS)}
    with ExitStack() as stack:
        api = Api(stack.enter_context(spoken(command, LISTENS, environment)).url)
        stack.callback(api.http.close)

        def start(node: str) -> Spoken:
            settings = {"data_dir": str(folder / node), "database_url": url, "node_name": node, "poll_seconds": 0.05}
            settings["lease_seconds"] = LEASE_SECONDS
            options = {"settings": settings, "journal": str(folder / f"{node}.txt"), "seconds": 600.0, "jobs": "real"}
            (folder / f"{node}.txt").touch()
            command = [str(SUPPORT / "service" / "worker_process.py"), json.dumps(options)]
            return stack.enter_context(spoken(command, WORKS))

        yield api, start, lambda node: (folder / f"{node}.txt").read_text().splitlines()


def cancellation(folder: Path) -> float:
    """From the call to the end of a tuning whose probe runs in another process."""
    with several_processes(folder) as (api, start, noted):
        start("far")
        path = api.submit("/v1/tunings", tuning_request().model_dump(mode="json"))
        wait_until(lambda: len(noted("far")) == 1)

        def cancel() -> None:
            api.http.post(f"{path}/cancel").raise_for_status()
            assert api.ended(path)["state"] == "CANCELLED"

        return seconds_of(cancel)


def takeover(folder: Path) -> float:
    """From SIGKILL of a worker to the next probe of its tuning on another one."""
    with several_processes(folder) as (api, start, noted):
        workers = {node: start(node) for node in ("one", "two")}
        api.submit("/v1/tunings", tuning_request().model_dump(mode="json"))
        wait_until(lambda: any(noted(node) for node in workers))
        first, second = sorted(workers, key=lambda node: not noted(node))
        workers[first].end(signal.SIGKILL)
        return wait_until(lambda: bool(noted(second)))


def small_answer(folder: Path) -> float:
    """The median of a hundred small answers on one connection."""
    with several_processes(folder) as (api, *_):
        return statistics.median(seconds_of(lambda: api.http.get("/livez")) for _ in range(100))


def longest_wait(folder: Path) -> float:
    """The longest that one of six threads waits to write, all writing to one file without a pause."""
    engine = open_engine(f"sqlite:///{folder / 'one.db'}")
    with write_transaction(engine) as connection:
        connection.execute(text("CREATE TABLE one (number INTEGER)"))
    together = threading.Barrier(WRITERS)
    waits: list[float] = []

    def write() -> None:
        with write_transaction(engine) as connection:
            connection.execute(text("INSERT INTO one VALUES (1)"))

    def writer(_: int) -> None:
        together.wait()
        waits.extend(seconds_of(write) for _ in range(WRITES))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(writer, range(WRITERS)))
    engine.dispose()
    return max(waits)


def store_many(service: Running) -> None:
    """Tunings that have been cancelled, written in bulk as the store writes them."""
    queued = service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json")).json()
    found = service.http.get(f"/v1/tunings/{queued['id']}", params={"wait": 20}).json()
    assert found["state"] == "SUCCEEDED"
    engine = open_engine(service.settings.url)
    with write_transaction(engine) as connection:
        row = dict(connection.execute(work_items.select().where(work_items.c.id == queued["id"])).mappings().one())
        rows = [
            row | {"id": f"tun_{number:032x}", "fingerprint": f"{number:064x}", "recommendation_id": None}
            for number in range(MANY)
        ]
        connection.execute(work_items.insert(), rows)
    engine.dispose()


def pages(folder: Path, rounds: int) -> dict[str, list[float]]:
    """First paints, and a scroll through a long list, with 10,000 tunings stored."""
    found: dict[str, list[float]] = {"paint /": [], "paint /tunings": [], "scroll": []}
    with running(folder, ScriptedRunner(37), Trainer()) as service, chromium() as browser:
        store_many(service)
        for _ in range(rounds):
            with watched(browser, service.url) as opened:
                for path in ("/", "/tunings"):
                    page = opened.open(path)
                    page.wait_for_load_state("networkidle")
                    found[f"paint {path}"].append(page.evaluate(PAINT) / 1000)
                found["scroll"].append(page.evaluate(REACTION) / 1000)
    return found


def estimates(rounds: int) -> dict[str, list[float]]:
    """The first estimate of a process, which imports torch, and those after it."""
    found: dict[str, list[float]] = {"first estimate": [], "second estimate": []}
    request = EstimateRequest(spec=mlp_spec(), gpus=("A10G",))
    for _ in range(rounds):
        warm = EstimatePool()
        for times in found.values():
            times.append(seconds_of(partial(warm.estimate, request)))
        warm.close()
    return found


def measured(rounds: int) -> dict[str, list[float]]:
    """Every reaction's times in seconds."""
    found: dict[str, list[float]] = {"cancellation": [], "takeover": [], "small answer": []}
    found["longest wait of a writer"] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, measure in zip(found, (cancellation, takeover, small_answer, longest_wait), strict=True):
                place = Path(folder, f"{name}-{number}")
                place.mkdir()
                found[name].append(measure(place))
        return found | pages(Path(folder, "pages"), rounds) | estimates(rounds)


def main() -> None:
    """Measure, print a line each, and write the results."""
    parser = new_parser(__doc__, "reaction_times.json")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = {
        name: {"median": round(statistics.median(times), 4), "largest": round(max(times), 4), "times": len(times)}
        for name, times in measured(given.rounds).items()
    }
    for name, row in rows.items():
        print(f"{name:26} median {row['median']:.3f} s, largest {row['largest']:.3f} s of {row['times']}")
    write_result(given.output, measured_here() | {"lease_seconds": LEASE_SECONDS, "seconds": rows})


if __name__ == "__main__":
    main()
