"""Kill every part of a fleet in turn while it runs tunings and jobs: does each end as an undisturbed one does?

python benchmarks/fleet_chaos.py [--engine ray] [--tunings 60] [--jobs 20] [--faults worker,node,...] [--rounds 2]
                                 [--limit-minutes 45] [--seed 0] [--output benchmarks/results/fleet_chaos.json]

In an environment with Ray and submitit, such as that of `make fleet-test`. The cluster is a real one on this machine: a
head and three nodes of Ray, or (`--engine slurm`, with BATCHWRIGHT_TEST_SLURM as there) a controller and two nodes of
Slurm, with CPU budgets as devices. With cgroups of version 1, as root, two nodes of Ray have more memory than the
third, so that the work is of mixed hardware. One piece of work of each kind runs undisturbed first. Then all work is
queued, and a worker process, a node, the dispatcher, PostgreSQL, the API and the head are killed in turn, each with
SIGKILL and when all is well again after the one before; what no supervisor of ours starts again is started at once.

The result is written after every step. All is well when every answer and every final weight equals the undisturbed one,
each update of a job was told once, no work ran twice at once, and neither a process nor a lease nor a file is left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos_processes import marked, wait_until
from fleet_chaos_clusters import cluster
from fleet_chaos_database import server
from fleet_chaos_faults import FAULTS, strike
from fleet_chaos_service import Service, TimeIsUpError, Watch, mark_processes
from fleet_chaos_work import Kind, References, job_kinds, judge, submit, tuning_kinds, undisturbed

from batchwright.hardware.inventory import cpu
from batchwright.planning.fingerprint import installed_versions
from batchwright.system.files import write_atomically
from tests.fleet.work import workers

_BUSY = 2
"""Workers that must run before a fault."""
_GONE_SECONDS = 120.0
"""Time in which nothing may be left after the end: to stop a job takes Ray up to half a minute at load."""
_END_MINUTES = 2.0
"""Of the limit, for judging and ending."""


class Run:
    """A run, and its result as far as it has come.

    Args:
        given: the options.
        mark: the mark of its processes.
    """

    def __init__(self, given: argparse.Namespace, mark: str) -> None:
        self.given = given
        self.mark = mark
        self.began = time.monotonic()
        self.deadline = self.began + 60.0 * (given.limit_minutes - _END_MINUTES)
        self.document: dict[str, Any] = {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": cpu().name,
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "versions": installed_versions(),
            **{name: getattr(given, name) for name in ("engine", "tunings", "jobs", "rounds", "seed", "limit_minutes")},
        }
        self.faults: list[dict[str, Any]] = []

    def note(self, **values: Any) -> None:  # noqa: ANN401 - JSON
        """Add to the result, write it, and tell."""
        load = [round(value, 1) for value in os.getloadavg()]
        self.document |= {**values, "seconds": round(time.monotonic() - self.began, 1), "load": load}
        others = {}
        if self.given.output.exists():
            others = json.loads(self.given.output.read_text(encoding="utf-8"))
        text = json.dumps(others | {self.given.label: self.document}, indent=1) + "\n"
        write_atomically(self.given.output, text)
        for name, value in values.items():
            shown = value[-1] if name == "faults" else value
            print(f"{self.document['seconds']:7.1f} s, load {load[0]}: {name}: {json.dumps(shown)[:600]}", flush=True)

    def chaos(self, service: Service, references: References, watch: Watch) -> None:
        """Queue everything, kill in turn, wait for the end, and judge."""
        kinds = _mixed(tuning_kinds(self.given.tunings, service.cluster.large_bytes), job_kinds(self.given.jobs))
        queued = {submit(service, kind, references, number): kind for number, kind in enumerate(kinds)}
        began = time.monotonic()
        try:
            with watch.watching():
                self._strike_all(service, queued)
                service.wait_until(lambda: not _unended(service, queued), "all work had ended")
        except TimeIsUpError as error:
            self.note(time_is_up=str(error), unended=_unended(service, queued))
        self.note(chaos_seconds=round(time.monotonic() - began, 1))
        rows = [judge(service, work, kind, references) for work, kind in queued.items()]
        self.note(**_summary(rows), workers_at_once=dict(sorted(watch.busy.items())))
        twice = {work: count for work, count in watch.workers.items() if count > 1}
        at_work = {work: count for work, count in watch.at_work.items() if count > 1}
        self.note(two_workers=twice, two_at_work=at_work)
        self.note(left=_left(service))

    def _strike_all(self, service: Service, queued: dict[str, Kind]) -> None:
        generator = random.Random(self.given.seed)
        for name in self.given.faults.split(",") * self.given.rounds:
            service.wait_until(
                lambda: len(workers()) >= _BUSY or len(_unended(service, queued)) < _BUSY, "workers were busy"
            )
            time.sleep(generator.uniform(0.0, self.given.pause_seconds))
            if len(_unended(service, queued)) < _BUSY:
                self.note(not_struck=name)
                return
            self.faults.append(strike(service, name) | {"unended": len(_unended(service, queued))})
            self.note(faults=self.faults)


def _mixed(tunings: Sequence[Kind], jobs: Sequence[Kind]) -> list[Kind]:
    """The jobs, spread among the tunings."""
    placed = [(place / max(1, len(kinds)), kind) for kinds in (tunings, jobs) for place, kind in enumerate(kinds)]
    return [kind for _, kind in sorted(placed, key=lambda item: item[0])]


def _unended(service: Service, queued: dict[str, Kind]) -> list[str]:
    rows = service.rows()
    return [work for work in queued if not rows[work].state.terminal]


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "well": sum(not row["wrong"] for row in rows),
        "wrong": [row for row in rows if row["wrong"]],
        "attempts": dict(sorted(Counter(row["attempts"] for row in rows).items())),
        "kinds": Counter(f"{row['kind']}, {row['place']}" for row in rows),
        "rows": rows,
    }


def _left(service: Service) -> dict[str, Any]:
    """Return what is left of the work while the fleet still runs."""

    def left() -> dict[str, Any]:
        fleet = service.fleet()
        found = {
            "workers": list(workers().values()),
            "cluster_jobs": fleet.running_jobs + fleet.pending_jobs,
            "leases": service.server.held(),
        }
        return {name: value for name, value in found.items() if value}

    wait_until(lambda: not left(), _GONE_SECONDS, 0.5)
    return left()


def _files_left(folder: Path) -> list[str]:
    """Temporary files of ours that no node has deleted. The folder of a user's liveness files stays, empty."""
    found = folder.glob("temporary/*/batchwright-*")
    return sorted(str(path.relative_to(folder)) for path in found if not path.is_dir() or any(path.iterdir()))


def _processes_left(mark: str) -> list[str]:
    own = os.getpid()

    def left() -> list[str]:
        return [f"{found.pid} {found.command[:200]}" for found in marked(mark) if found.pid != own]

    wait_until(lambda: not left(), _GONE_SECONDS, 0.5)
    return left()


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ray", "slurm"), default="ray")
    parser.add_argument("--tunings", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"in this order: {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=2, help="how often each fault happens, if the work lasts")
    parser.add_argument("--pause-seconds", type=float, default=10.0, help="most of a random pause before a fault")
    parser.add_argument("--limit-minutes", type=float, default=45.0, help="everything ends by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="name of the run in the results; that of the engine when absent")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fleet_chaos.json")
    parser.add_argument("--keep", type=Path, help="folder for all that is written; a temporary one otherwise")
    given = parser.parse_args()
    given.label = given.label or given.engine
    if unknown := set(given.faults.split(",")) - set(FAULTS):
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    return given


def main() -> None:
    """Run, and exit with status 1 when something is wrong."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end what runs
    run = Run(given, uuid.uuid4().hex)
    mark_processes(run.mark)
    with ExitStack() as whole:
        folder = given.keep or Path(whole.enter_context(tempfile.TemporaryDirectory(prefix="fleet-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            database = stack.enter_context(server())
            url = database.url.render_as_string(hide_password=False)
            made = stack.enter_context(cluster(given.engine, folder, url))
            service = Service(folder, made, database, run.deadline)
            stack.enter_context(service.running())
            run.note(mixed_hardware=made.large_bytes is not None, nodes=made.nodes)
            references = undisturbed(service, given.jobs)
            run.note(undisturbed=references.answers, undisturbed_seconds=references.seconds)
            run.chaos(service, references, Watch(run.mark))
            files = _files_left(folder)
        run.note(processes_left=_processes_left(run.mark), files_left=files)
    found = run.document
    is_well = found["well"] == given.tunings + given.jobs and not found["two_at_work"] and not found["left"]
    sys.exit(not is_well or bool(found["processes_left"] or found["files_left"]))


if __name__ == "__main__":
    main()
