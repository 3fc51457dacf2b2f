"""Training runs that are killed with SIGKILL and started again: is the final weights' hash that of an undisturbed run?

python benchmarks/sigkill_soak.py [--rounds 1] [--output benchmarks/results/sigkill_soak.json]

A round is the twenty kills of tests/training/launching/test_soak.py: in a window, in a save (a folder half-written, or
whole and not yet
named by the pointer), at an epoch's edge, at any time; half of them with two processes that load data. Each kill has a
run of its own. One that missed its moment is in the table too, and is made again. The undisturbed run they are compared
with is made by fresh interpreters, the killed ones are forked from a server that has torch imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before the server starts, whose forks are the runs

from batchwright.hardware.inventory import cpu
from batchwright.planning.fingerprint import installed_versions
from tests.support.forked import forked_starts
from tests.support.soak import (
    UPDATES,
    KilledRun,
    Killer,
    Planned,
    RunOutput,
    kill_and_resume,
    planned,
    references,
    reported_updates,
    run_recommendation,
    run_request,
    undisturbed,
)

_ATTEMPTS = 5


def row_of(plan: Planned, killed_run: KilledRun, reference: RunOutput) -> dict[str, Any]:
    """A kill, as it is written."""
    return {
        "moment": str(plan.moment),
        "workers": plan.workers,
        "met": killed_run.hit,
        "update_at_kill": killed_run.disk_state.update,
        "folder_half_written": killed_run.disk_state.half_written,
        "folder_not_yet_named": killed_run.disk_state.unnamed,
        "newest_checkpoint": killed_run.disk_state.checkpoint,
        "resumed_from": killed_run.resumed_from,
        "all_processes_gone_seconds": round(killed_run.exit_seconds, 3),
        "seconds": round(killed_run.seconds, 2),
        "hash_equal": killed_run.final.weights_sha256 == killed_run.final.stated_sha256 == reference.weights_sha256,
        "averages_equal": killed_run.final.averages_sha256 == reference.averages_sha256,
        "updates_told_once": reported_updates(killed_run.final) == list(range(1, UPDATES + 1)),
        "losses_equal": killed_run.final == reference,
    }


def soak(directory: Path, rounds: int, reference: RunOutput) -> Iterator[dict[str, Any]]:
    """A row for every kill."""
    with forked_starts(fsync_seconds=0.01):
        seconds = references(directory / "references")[0][1]
        for number in range(rounds):
            for place, plan in enumerate(planned()):
                for attempt in range(_ATTEMPTS):
                    killer = Killer(plan, attempt, seconds, seed=number)
                    killed_run = kill_and_resume(directory / f"{number}-{place}-{attempt}", killer)
                    yield row_of(plan, killed_run, reference)
                    if killed_run.hit:
                        break


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    state = "half a folder" if row["folder_half_written"] else "before the pointer" * row["folder_not_yet_named"]
    figures = [row["moment"], row["workers"], row["update_at_kill"], state, row["resumed_from"], row["seconds"]]
    cells = ["-" if it in {None, ""} else str(it) for it in figures]
    print(f"| {' | '.join(cells)} | {'yes' if row['hash_equal'] else 'NO'} |", flush=True)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of twenty kills")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sigkill_soak.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        reference, _ = undisturbed(Path(directory, "fresh"), run_recommendation(), run_request())
        print("| moment | workers | update at the kill | in a save | resumed from | seconds | hash equal |")
        print("|---|---|---|---|---|---|---|")
        rows = []
        for row in soak(Path(directory), arguments.rounds, reference):
            show(row)
            rows.append(row)
    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{cpu().name}, {os.cpu_count()} logical processors",
        "python": platform.python_version(),
        "versions": installed_versions(),
        "updates": UPDATES,
        "weights_sha256": reference.weights_sha256,
        "kills": len(rows),
        "equal": sum(row["hash_equal"] for row in rows),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
