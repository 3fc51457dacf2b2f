"""The parts that benchmarks share: options, results with the machine they were measured on, tables and processes."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchwright.hardware.inventory import cpu
from batchwright.planning.fingerprint import installed_versions
from batchwright.system.files import write_atomically

HERE = Path(__file__).resolve().parent


def new_parser(documentation: str | None, result: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of options, with ``--output`` if the benchmark writes a file of this name to ``results/``."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if result is not None:
        parser.add_argument("--output", type=Path, default=HERE / "results" / result, help="file of the result")
    return parser


def measured_here(*packages: str, device: str | None = None) -> dict[str, Any]:
    """Return when, how and on what a result is measured, with the versions of ``packages`` too."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "device": device or cpu().name,
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {**installed_versions(), **{name: version(name) for name in packages}},
    }


def read_result(path: Path) -> dict[str, Any]:
    """Return an earlier result; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def print_row(*cells: object) -> None:
    """Print a row of a markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names: str) -> None:
    """Print the head of a markdown table."""
    print_row(*names)
    print("|---" * len(names) + "|")


def let_probes_import(*folders: Path) -> None:
    """Let processes that are started from now on import the workloads of this folder, and of others."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *map(str, folders), os.environ.get("PYTHONPATH", "")])


def forget_settings() -> None:
    """Let services that are started from now on have no settings of this shell."""
    for name in [name for name in os.environ if name.startswith("BATCHWRIGHT_")]:
        del os.environ[name]


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = 0.005) -> bool:
    """Wait for a condition. Return False if it was not met within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


def process_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, without its children: user and system time of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
