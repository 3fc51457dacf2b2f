"""Kills at random moments of tunings and jobs: does each end as an undisturbed one does?

python benchmarks/chaos.py [--rounds 50] [--seed 0] [--output benchmarks/results/chaos.json]

A round submits a tuning or a job to a service of the CPU and, at a random moment, kills with SIGKILL the service, its
API or its worker (in a third of the rounds once more while it recovers), also just when it is asked for the work, the
process of a probe, the fork server, also while it starts, or the process of a training run; pauses what holds the
lease until that has ended; makes the database unusable: the file of SQLite locked, the connections to PostgreSQL ended;
fills the disk of the runs (as root, which can mount one); or takes the worker's descriptors. Half of the rounds are on
one process and SQLite, half on an API and a worker apart and PostgreSQL (see tests/support/service/postgres.py).

A round is well when the recommendation (decision, plan, proof) or the SHA-256 of the final weights is that of an
undisturbed run, the work was stored once, no probe whose result was recorded was run again, no process was left, and
no two ran at once on the device. A round whose work had ended before its moment is in the table too, and is played
again at another moment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos_deployment import Deployment, PostgresqlDatabase, SqliteDatabase
from chaos_faults import Choices, faults_of
from chaos_rounds import Reference, Round, play, request, undisturbed

from batchwright.hardware.inventory import cpu
from batchwright.planning.fingerprint import installed_versions
from tests.support.service.postgres import databases

_TRIES = 4


def choices_of(generator: random.Random, attempt: int) -> Choices:
    """A moment; the earlier, the more often the work had ended before."""
    return Choices(
        at=generator.random() / (attempt + 1),
        hold_seconds=generator.uniform(0.3, 9.0),
        again_after=generator.uniform(0.0, 5.0) if generator.random() < 1 / 3 else None,
        at_once=generator.random() < 0.5,
    )


def rounds_on(
    deployment: Deployment, reference: Reference, count: int, generator: random.Random, wanted: str
) -> Iterator[dict[str, Any]]:
    """Rounds, with every fault in turn whose name holds a text."""
    every = [(work, fault) for work in ("tuning", "job") for fault in faults_of(deployment, work)]
    chosen = [(work, fault) for work, fault in every if wanted in fault.name]
    ways = chosen * -(-count // max(1, len(chosen)))
    for work, fault in generator.sample(ways, min(count, len(ways))):
        for attempt in range(_TRIES):
            row = play(deployment, Round(work, fault, choices_of(generator, attempt)), reference)
            yield row
            if row["met"]:
                break


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    cells = [row["deployment"], row["work"], row["fault"], row["at_seconds"], row["what"], row["attempts"]]
    outcome = "; ".join(row["wrong"]) or "well"
    print(f"| {' | '.join(map(str, [*cells, row['seconds'], outcome]))} |", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds in numbers."""
    gone = [row["gone_seconds"] for row in rows if row["gone_seconds"] is not None]
    return {
        "rounds": sum(row["met"] for row in rows),
        "missed": sum(not row["met"] for row in rows),
        "well": sum(row["met"] and not row["wrong"] for row in rows),
        "equal": sum(row["met"] and row.get("equal", False) for row in rows),
        "recorded_probes_run_again": sum(row.get("recorded_and_run_again", 0) for row in rows),
        "gone_seconds": {"median": statistics.median(gone), "largest": max(gone)} if gone else None,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def deployments(folder: Path, postgresql: str) -> list[Deployment]:
    """A service in one process on SQLite; its API and its worker apart on PostgreSQL."""
    sqlite = SqliteDatabase(folder / "one.db")
    return [
        Deployment("one process, SQLite", folder / "one", sqlite, apart=False),
        Deployment("API and worker, PostgreSQL", folder / "two", PostgresqlDatabase(postgresql), apart=True),
    ]


def main() -> None:
    """Run, print, write; exit status 1 when a round did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "chaos.json")
    parser.add_argument("--fault", default="", help="only faults whose name holds this, such as `runs folder full`")
    parser.add_argument("--keep", type=Path, help="folder for all that the services write; a temporary one otherwise")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    references: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        chosen = deployments(folder, stack.enter_context(databases()).empty())
        print("| deployment | work | fault | at, s | what | attempts | seconds | ended |\n" + "|---" * 8 + "|")
        for place, deployment in enumerate(chosen):
            count = arguments.rounds // len(chosen) + (place < arguments.rounds % len(chosen))
            with deployment.running():
                reference = undisturbed(deployment)
                references[deployment.name] = {
                    "seconds": {work: round(seconds, 2) for work, seconds in reference.seconds.items()},
                    "decision": reference.decision,
                    "probes": reference.probes,
                    "weights_sha256": reference.weights_sha256,
                }
                for row in rounds_on(deployment, reference, count, generator, arguments.fault):
                    show(row)
                    rows.append(row)
    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": cpu().name,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "seed": arguments.seed,
        "request": request().model_dump(mode="json", exclude_defaults=True),
        "undisturbed": references,
        **summary(rows),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(rows)))
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
