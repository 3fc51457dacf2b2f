"""The load of a fleet on PostgreSQL: idle, with new work, with a queue, and after a fifth of its hosts vanished.

python benchmarks/fleet.py [--hosts 250] [--devices 8] [--items 20000] [--rate 20] [--lease-seconds 15]
                           [--output benchmarks/results/fleet.json] [--label now]
python benchmarks/fleet.py --table [LABEL ...]     (print the table of the documents again)

Several numbers of hosts (`--hosts 25,50,100`) give a row each. The store, the heartbeats, the notifications and
PostgreSQL are real, with synchronous commits on this machine's disk; the hosts are loops in five processes on the same
machine, each with its own store (``fleet_hosts.py``); work sleeps for a moment. Nothing here measures a network.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from fleet_database import Observer
from fleet_hosts import UPDATES_THAT_HOLD, Plan, hardware
from reporting import (
    HERE,
    measured_here,
    new_parser,
    print_head,
    print_row,
    process_seconds,
    read_result,
    wait_until,
    write_result,
)
from sqlalchemy import URL, insert, make_url

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobRequest
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.database.schema import now_ms, submitters, work_items
from batchwright_service.store.database.transactions import insert_or_skip, write_transaction
from batchwright_service.store.models import NewWork
from batchwright_service.store.store import Store, open_store
from tests.support.factories import recommendation
from tests.support.service.postgres import Databases, own_server
from tests.support.service.scripted import new_work

HEAD = (
    "hosts, devices (load)",
    "transactions per device and second, idle",
    "submission to claim, median / p99",
    "claims a second (items, failed transactions)",
    "processor ms for an item: PostgreSQL / simulator",
    "most connections",
    "takeover, worst",
)
PROCESSES = 5
"""Processes of hosts; one of them is killed, so that a fifth of the hosts vanishes."""
SUBMITTERS = 10
WORK_SECONDS = 0.05
SETTLE_SECONDS = 25.0
"""PostgreSQL counts the last transactions of an idle connection after ten seconds."""
PATIENCE_SECONDS = 900.0
SERVER = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "max_connections": "3000",
    "shared_buffers": "512MB",
}


class Fleet:
    """The processes of a fleet's hosts, and the store of the API that submits to them."""

    def __init__(self, url: str, server: URL, folder: Path, given: argparse.Namespace, hosts: int) -> None:
        self.given = given
        self.hosts = hosts
        self.devices = hosts * given.devices
        self.store: Store = open_store(url)
        self.observer = Observer(make_url(url).set(drivername="postgresql+psycopg"), server)
        self._new_id = IdentifierSource().new
        self.plans = [
            Plan(
                url=url,
                folder=str(folder),
                hosts=[f"host{number:03}" for number in range(part, hosts, PROCESSES)],
                devices=given.devices,
                lease_seconds=given.lease_seconds,
                work_seconds=WORK_SECONDS,
            )
            for part in range(PROCESSES)
        ]
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start every host, and wait until all devices are served."""
        for plan in self.plans:
            command = [sys.executable, str(HERE / "fleet_hosts.py"), json.dumps(asdict(plan))]
            pipe = subprocess.PIPE
            self._processes.append(subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe))  # noqa: S603 - ours
        for process in self._processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("a process of hosts did not start; its errors are above")

    def kill_one(self) -> int:
        """Kill the first process of hosts, and return the number of hosts that vanish."""
        self._processes[0].send_signal(signal.SIGKILL)
        self._processes[0].wait()
        return len(self.plans[0].hosts)

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self.store.close()

    def used(self) -> dict[str, float]:
        """What the fleet has used so far: seconds of processors and of the clock, and transactions."""
        return {
            "postgresql": self.observer.cpu_seconds(),
            "hosts": sum(process_seconds(process.pid) for process in self._processes if process.poll() is None),
            "transactions": self.observer.transactions(),
            "rolled_back": self.observer.transactions("xact_rollback"),
            "seconds": time.monotonic(),
        }

    def used_since(self, before: Mapping[str, float]) -> dict[str, float]:
        """What it has used since then."""
        return {name: now - before[name] for name, now in self.used().items()}

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: when that takes too long.
        """
        if not wait_until(condition, PATIENCE_SECONDS, 0.5):
            raise TimeoutError(otherwise)

    def until_none(self, condition: str) -> None:
        """Wait until no work is in a state."""
        query = f"SELECT 1 FROM work_items WHERE {condition} LIMIT 1"  # noqa: S608 - ours
        self.until(lambda: not self.observer.rows(query), f"work with {condition} is left")

    def new_works(self, number: int, updates: int = 1) -> list[NewWork]:
        """New jobs, in turn for each index of a device and for each submitter."""
        job = JobRequest(recommendation=recommendation(), training=TrainingRequest(updates=updates))
        payload = job.model_dump_json()
        return [
            new_work(
                self._new_id("job"),
                WorkKind.JOB,
                payload=payload,
                device=f"cuda:{index % self.given.devices}",
                hardware=hardware(),
                key_id=f"key{index % SUBMITTERS}",
            )
            for index in range(number)
        ]

    def queue_at_once(self, works: Sequence[NewWork]) -> None:
        """Queue much work in one transaction, as a backlog that was there before the workers."""
        times = {"created_at": now_ms(), "updated_at": now_ms(), "state": State.QUEUED}
        names = NewWork.__dataclass_fields__
        rows = [{name: getattr(work, name) for name in names} for work in works]
        with write_transaction(self.store.engine) as connection:
            connection.execute(insert(work_items).values(**times), rows)
            for number in range(SUBMITTERS):
                insert_or_skip(connection, submitters, {"id": f"key{number}"})


@contextmanager
def fleet(given: argparse.Namespace, hosts: int) -> Iterator[Fleet]:
    """A fleet on a server and a database of its own."""
    with ExitStack() as stack:
        # In memory: on real hosts, the files of runs are not on the disk of the database.
        memory = Path("/dev/shm")  # noqa: S108 - of Linux, and its owner's alone within
        in_memory = memory if memory.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        server = stack.enter_context(own_server(**SERVER))
        databases = Databases(server)
        stack.callback(databases.close)
        made = Fleet(databases.migrated(), server, folder, given, hosts)
        stack.callback(made.close)
        began = time.monotonic()
        made.start()
        waiting = "SELECT count(*) FROM workers WHERE waits"
        made.until(lambda: made.observer.rows(waiting)[0][0] >= made.devices, "not every device waits for work")
        seconds = time.monotonic() - began
        print(f"{hosts} hosts of {given.devices} devices wait for work after {seconds:.0f} s", flush=True)
        time.sleep(SETTLE_SECONDS)
        yield made


def idle(made: Fleet, seconds: float) -> dict[str, float]:
    """Transactions and processor time of an idle fleet."""
    before = made.used()
    time.sleep(seconds)
    used = made.used_since(before)
    elapsed = used["seconds"]
    return {
        "transactions_per_second": round(used["transactions"] / elapsed, 1),
        "transactions_per_device_and_second": round(used["transactions"] / elapsed / made.devices, 4),
        "postgresql_cores": round(used["postgresql"] / elapsed, 3),
        "hosts_cores": round(used["hosts"] / elapsed, 3),
        "connections": made.observer.connections(),
    }


def waits(made: Fleet, number: int, rate: float) -> dict[str, float]:
    """Times from submission to claim, of work that is submitted at a rate to a fleet that is mostly idle."""
    began = time.monotonic()
    for index, work in enumerate(made.new_works(number)):
        time.sleep(max(0.0, began + index / rate - time.monotonic()))
        made.store.submissions.add(work)
    submitted = time.monotonic() - began
    made.until_none("state <> 'SUCCEEDED'")
    rows = made.observer.rows("SELECT started_at - created_at FROM work_items")
    seconds = sorted(row[0] / 1000 for row in rows)
    return {
        "items": number,
        "submitted_per_second": round(number / submitted, 1),
        "median_seconds": round(statistics.median(seconds), 4),
        "p99_seconds": round(seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))], 4),
        "worst_seconds": round(seconds[-1], 4),
    }


def throughput(made: Fleet, number: int) -> dict[str, float]:
    """Claims a second while much work waits: of the middle four fifths of the claims."""
    made.observer.rows("TRUNCATE work_items CASCADE")
    made.queue_at_once(made.new_works(number))
    announcing = made.new_works(made.given.devices)
    before = made.used()
    stop = threading.Event()

    def most_connections() -> int:
        most = 0
        while not stop.wait(1.0):
            most = max(most, made.observer.connections())
        return most

    with ThreadPoolExecutor(1) as pool:
        connections = pool.submit(most_connections)
        for work in announcing:  # announces the queue
            made.store.submissions.add(work)
        try:
            made.until_none("state <> 'SUCCEEDED'")
        finally:
            stop.set()
    used = made.used_since(before)
    elapsed = used["seconds"]
    rows = made.observer.rows("SELECT started_at FROM work_items ORDER BY started_at")
    tenth = len(rows) // 10
    first, last = rows[tenth][0], rows[-tenth - 1][0]
    return {
        "items": len(rows),
        "claims_per_second": round((len(rows) - 2 * tenth) / max(0.001, (last - first) / 1000), 1),
        "seconds": round(elapsed, 1),
        "postgresql_cores": round(used["postgresql"] / elapsed, 3),
        "hosts_cores": round(used["hosts"] / elapsed, 3),
        "rolled_back": used["rolled_back"],
        "items_per_cpu_second_of_postgresql": round(len(rows) / max(0.01, used["postgresql"]), 1),
        "items_per_cpu_second_of_hosts": round(len(rows) / max(0.01, used["hosts"]), 1),
        "transactions_per_item": round(used["transactions"] / len(rows), 1),
        "most_connections": connections.result(),
    }


def takeover(made: Fleet) -> dict[str, float]:
    """Times from the end of a fifth of the hosts to the next claim of what ran there, with half of the devices idle."""
    made.observer.rows("TRUNCATE work_items CASCADE")
    works = made.new_works(made.devices // 2, UPDATES_THAT_HOLD)
    for work in works:
        made.store.submissions.add(work)
    made.until_none("state <> 'RUNNING'")
    now = made.observer.rows("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)")[0][0]
    owners = {row.owner for row in made.observer.rows("SELECT DISTINCT owner FROM work_items")}
    gone = made.kill_one()
    names = [f"{name}:" for name in islice(made.plans[0].hosts, gone)]
    lost = [owner for owner in owners if owner.startswith(tuple(names))]
    held = made.observer.rows("SELECT id FROM work_items WHERE owner = ANY(:lost)", lost=lost)
    ids = [row.id for row in held]
    query = "SELECT claimed_at FROM work_items WHERE id = ANY(:ids) AND token > 1"
    wait_until(lambda: len(made.observer.rows(query, ids=ids)) == len(ids), PATIENCE_SECONDS, 0.5)
    seconds = sorted((row.claimed_at - now) / 1000 for row in made.observer.rows(query, ids=ids))
    return {
        "hosts": gone,
        "items": len(ids),
        "taken_over": len(seconds),
        "median_seconds": round(statistics.median(seconds), 2),
        "worst_seconds": round(seconds[-1], 2),
        "worst_leases": round(seconds[-1] / made.given.lease_seconds, 2),
    }


def row_of(given: argparse.Namespace, hosts: int) -> dict[str, Any]:
    """Every measurement of one fleet."""
    with fleet(given, hosts) as made:
        row: dict[str, Any] = {"hosts": hosts, "devices": made.devices, "load_before": os.getloadavg()[0]}
        row["postgresql"] = made.observer.version
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "idle": lambda: idle(made, given.idle_seconds),
            "submission_to_claim": lambda: waits(made, given.submissions, given.rate),
            "queue": lambda: throughput(made, given.items),
            "takeover": lambda: takeover(made),
        }
        for name, measure in parts.items():
            row[name] = measure()
            print(f"{hosts} hosts, {name}: {row[name]}", flush=True)
        row["load_after"] = os.getloadavg()[0]
    return row


def cells(label: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one fleet in the table of the documents."""
    still, waited, queue, taken_over = (row[part] for part in ("idle", "submission_to_claim", "queue", "takeover"))
    costs = (queue.get(f"items_per_cpu_second_of_{name}") for name in ("postgresql", "hosts"))
    return (
        f"{label}: {row['hosts']}, {row['devices']} ({row['load_before']:.0f} to {row['load_after']:.0f})",
        f"{still['transactions_per_device_and_second']:.3f}",
        f"{waited['median_seconds']:.3f} / {waited['p99_seconds']:.3f} s",
        f"{queue['claims_per_second']:.0f} ({queue['items']}, {queue.get('rolled_back', 'not counted')})",
        " / ".join("not measured" if each is None else f"{1000 / each:.1f}" for each in costs),
        str(queue.get("most_connections", "not measured")),
        f"{taken_over['worst_leases']:.2f} leases ({taken_over['hosts']} hosts, {taken_over['items']} items)",
    )


def main() -> None:
    """Measure, print a line for each part, write the results, and print the table."""
    parser = new_parser(__doc__, "fleet.json")
    parser.add_argument("--hosts", default="250", help="numbers of hosts, separated by commas")
    parser.add_argument("--devices", type=int, default=8, help="devices of each host")
    parser.add_argument("--items", type=int, default=20_000, help="queued items of the throughput")
    parser.add_argument("--submissions", type=int, default=600, help="items that are submitted to an idle fleet")
    parser.add_argument("--rate", type=float, default=20.0, help="submissions a second")
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--label", default="now", help="name of the rows in the output")
    parser.add_argument("--table", nargs="*", help="print the rows of these labels, or of all, and measure nothing")
    given = parser.parse_args()
    if given.table is None:
        rows = [row_of(given, int(hosts)) for hosts in given.hosts.split(",")]
        run = measured_here() | {"lease_seconds": given.lease_seconds, "rows": rows}
        write_result(given.output, read_result(given.output) | {given.label: run})
    labels = [given.label] if given.table is None else given.table
    print_head(*HEAD)
    for label, made in read_result(given.output).items():
        if isinstance(made, dict) and "rows" in made and (label in labels or not labels):
            for row in made["rows"]:
                print_row(*cells(label, row))


if __name__ == "__main__":
    main()
