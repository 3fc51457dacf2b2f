"""Kill every part of a deployment while it works: does each tuning and job end as an undisturbed one does?

python benchmarks/chaos.py [--deployments embedded,workers] [--rounds 25] [--seed 0] [--fault NAME] [--keep FOLDER]
                           [--work 40] [--limit-minutes 60] [--output benchmarks/results/chaos.json]

Deployments: `embedded` is one service on SQLite; `workers` an API and two workers on PostgreSQL; `ray` and `slurm` an
API that dispatches to a real cluster on this machine, in the environment of `make fleet-test` (`slurm` with
BATCHWRIGHT_TEST_SLURM as there).

Without a cluster, a round runs one tuning or job and one fault at a random moment of it. A fault that missed its moment
is in the table too, and is tried again. With a cluster, `--work` pieces of work are queued and `--rounds` faults happen
in turn, each when all is well again after the one before.

Faults: SIGKILL of the service, its API or a worker, in a third of the cases once more while it recovers, or just when
work is submitted; of a probe; of a fork server, also while it starts; of a training process, also in an update, in a
save or at the end of an epoch; of PostgreSQL, the dispatcher, a node, the head of a cluster. A worker that is paused
until its lease has ended; a database whose file is locked or whose connections end; a full disk (as root, which can
mount one); a process without descriptors.

All is well if each recommendation (decision, plan, proof) and each job (SHA-256 of weights and averages, losses) equals
the undisturbed one, all work was stored once, no recorded probe was run again, each update was reported once, no work
ran twice at once, and neither a process nor a lease nor a file is left. The result is written after every round.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from chaos_deployments import NAMES, Deployment, left_after_the_end, started
from chaos_faults import Fault, faults_of
from chaos_parts import tasks
from chaos_work import ON_A_CLUSTER, ON_ONE_HOST, Kind, References, judge, submit, undisturbed
from reporting import measured_here, new_parser, read_result, wait_until, write_result

from batchwright.client.documents.states import State

_TRIES = 4
"""Most tries of a fault whose moment was missed."""
_BUSY = 2
"""Processes that must work on a cluster before a fault, if there is as much work."""
_SUBMISSION_SECONDS = 0.1
_FAULT_SECONDS = 120.0
"""Time in which work must go on after a fault, before the next one."""


def strike(deployment: Deployment, fault: Fault) -> dict[str, Any]:
    """Let a fault happen. Return its row, with the seconds until all that ran at the fault runs on or has ended."""
    before = {row.id: row.events for row in deployment.unended() if row.state is State.RUNNING}
    began = time.monotonic()
    deployment.gone_seconds.clear()
    what = fault.strike(deployment)
    deployment.await_gone()
    gone = deployment.gone_seconds

    def all_go_on() -> bool:
        rows = [row for row in deployment.unended() if row.id in before]
        return all(row.state is State.RUNNING and row.events > before[row.id] for row in rows)

    wait_until(all_go_on, _FAULT_SECONDS, 0.1)
    return {
        "fault": fault.name,
        "met": what is not None,
        "what": what or "its moment was missed",
        "strays": list(map(str, deployment.strays())),
        "gone_seconds": None if None in gone else max(filter(None, gone), default=0.0),
        "goes_on_seconds": round(time.monotonic() - began, 1),
    }


def play(
    deployment: Deployment, kinds: list[Kind], faults: list[Fault], references: References, attempt: int = 0
) -> dict[str, Any]:
    """Submit work, let faults happen while it runs, wait for its end, and judge it."""
    began, since, known = time.monotonic(), time.time(), set(deployment.rows())
    struck: list[dict[str, Any]] = []
    queued: dict[str, Kind] = {}

    def submit_all() -> None:
        for kind in kinds:
            queued[submit(deployment, kind, references)] = kind
        deployment.in_flight = set(queued)

    def is_busy() -> bool:
        wanted = _BUSY if deployment.cluster else 0  # elsewhere faults may come before the work begins
        return len(tasks(deployment.processes())) >= min(wanted, len(deployment.unended()))

    with ThreadPoolExecutor(1) as pool:
        submission = pool.submit(submit_all)
        for fault in faults:
            at = deployment.generator.random() / (attempt + 1)  # the earlier, the more often it has missed
            if fault.during_submission:
                time.sleep(at * _SUBMISSION_SECONDS)
            else:
                submission.result()
                wait_until(is_busy, deployment.seconds_left, 0.1)
                time.sleep(at * references.seconds[str(kinds[0])] if fault.waits else 0.0)
            if submission.done() and not deployment.unended():
                break
            struck.append(strike(deployment, fault))
            print(f"{deployment.name}: {json.dumps(struck[-1])}", flush=True)
        submission.result()
    wait_until(lambda: not deployment.unended(), deployment.seconds_left, 0.1)
    work = [judge(deployment, work_id, kind, references, since) for work_id, kind in queued.items()]
    stored = sorted(set(deployment.rows()) - known)
    wrong = [f"stored: {stored}, submitted: {sorted(queued)}"] * (stored != sorted(queued))
    wrong += [f"left: {name}: {values}" for name, values in deployment.left().items() if values]
    wrong += [f"processes outlived the fault: {row}" for row in struck if row["gone_seconds"] is None]
    wrong += [f"the same work ran twice at once: {entry}" for entry in deployment.journal(since) if not entry["alone"]]
    wrong += [f"{row['id']} ({row['kind']}): {text}" for row in work for text in row["wrong"]]
    return {"faults": struck, "work": work, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}


def rounds_on(deployment: Deployment, references: References, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Play the rounds of a deployment, with every fault in turn."""
    generator = deployment.generator
    known = [fault for fault in faults_of(deployment) if given.fault in fault.name]
    ways = [(work, fault) for fault in known for work in fault.works]
    shuffled = [way for _ in range(given.rounds) for way in generator.sample(ways, len(ways))][: given.rounds]
    if deployment.cluster is not None:
        kinds = list(islice(cycle(ON_A_CLUSTER), given.work))
        yield play(deployment, kinds, [fault for _, fault in shuffled], references)
        return
    for work, fault in shuffled:
        kind = generator.choice([kind for kind in ON_ONE_HOST if kind.work == work])
        for attempt in range(_TRIES):
            row = play(deployment, [kind], [fault], references, attempt)
            yield row
            if any(struck["met"] for struck in row["faults"]):
                break


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rounds in numbers."""
    faults = [fault for row in rows for fault in row["faults"]]
    work = [item for row in rows for item in row["work"]]
    met = [fault for fault in faults if fault["met"]]
    found: dict[str, Any] = {"faults": len(met), "missed": len(faults) - len(met)}
    found |= {"work": len(work), "well": sum(not item["wrong"] for item in work)}
    for name in ("gone_seconds", "goes_on_seconds"):
        values = [fault[name] for fault in met if fault[name] is not None]
        found[name] = {"median": statistics.median(values), "worst": max(values)} if values else None
    return found | {"wrong": [text for row in rows for text in row["wrong"]], "rounds": rows}


def run(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Disturb a deployment. Return its result, which is written after every round."""
    document = measured_here() | {"seed": given.seed}
    began = time.monotonic()

    def write(found: dict[str, Any]) -> None:
        document.update(found, seconds=round(time.monotonic() - began, 1), load=os.getloadavg())
        write_result(given.output, read_result(given.output) | {name: document})

    rows: list[dict[str, Any]] = []
    deadline = began + 60.0 * given.limit_minutes
    with started(name, folder, deadline, random.Random(given.seed)) as deployment:
        references = undisturbed(deployment, ON_A_CLUSTER if deployment.cluster else ON_ONE_HOST)
        write({"undisturbed_seconds": references.seconds})
        for row in rounds_on(deployment, references, given):
            rows.append(row)
            write(summary(rows))
    write({"left": left_after_the_end(folder)})
    return document


def main() -> None:
    """Run, print, write. The exit status is 1 when something is wrong."""
    parser = new_parser(__doc__, "chaos.json")
    parser.add_argument("--deployments", default="embedded,workers", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=25, help="faults on each deployment")
    parser.add_argument("--work", type=int, default=40, help="pieces of work that are queued on a cluster")
    parser.add_argument("--fault", default="", help="only faults whose name contains this, such as `disk full`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-minutes", type=float, default=60.0, help="for each deployment")
    parser.add_argument("--keep", type=Path, help="folder for all that the services write; a temporary one otherwise")
    given = parser.parse_args()
    names = given.deployments.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"unknown deployments: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end what runs
    is_well = True
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for name in names:
            document = run(name, (given.keep or Path(folder)) / name, given)
            print(json.dumps({key: document[key] for key in document.keys() - {"rounds", "versions"}}), flush=True)
            is_well = is_well and not document["wrong"] and not document["left"]
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
