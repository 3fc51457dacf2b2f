"""Seconds of a probe whose imports are shared, beside a fresh one, by the way in which the packages are installed.

python benchmarks/shared_imports.py [--probes 4]

The program is that of HF Trainer in `tests/commands/programs/`. Its packages are those of this interpreter's
environment, which an interpreter without any finds in its own site folder (`venv`: this one), by a `.pth` file of a new
environment, or by `PYTHONPATH`. `editable` is a project with the packages in its folder, which is installed into a new
environment as pip leaves it. Probes with and without a fork server take turns, after the first one of the server, which
includes the imports; it is reported apart.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.hardware.inventory import cpu
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome
from tests.commands.program_list import FOLDER, HUGGING_FACE, ONE_THREAD

SITE = Path(sysconfig.get_path("purelib"))


def new_environment(folder: Path) -> tuple[str, Path]:
    """An interpreter without packages, and its site folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)  # noqa: S603 - ours
    return str(folder / "bin" / "python"), next(folder.glob("lib/python3*/site-packages"))


def overlay(folder: Path) -> tuple[str, Mapping[str, str]]:
    """A `.pth` file names the packages."""
    python, site = new_environment(folder)
    (site / "overlay.pth").write_text(f"{SITE}\n")
    return python, {}


def python_path(folder: Path) -> tuple[str, Mapping[str, str]]:
    """A module of a cluster sets `PYTHONPATH`."""
    return new_environment(folder)[0], {"PYTHONPATH": str(SITE)}


def editable(folder: Path) -> tuple[str, Mapping[str, str]]:
    """The packages are in the folder of an editable project, by links to files and folders."""
    python, site = new_environment(folder / "environment")
    project = folder / "project"
    project.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.endswith(".pth"):
            (project / entry.name).symlink_to(entry)
    metadata = site / "project-1.0.dist-info"
    metadata.mkdir()
    (metadata / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    (site / "project.pth").write_text(f"{project}\n")
    return python, {}


def request(python: str, environment: Mapping[str, str], *, fresh: bool) -> ProbeRequest:
    """A probe; that of a plan without a server is fresh."""
    words = [word for name, value in HUGGING_FACE.items() for word in (f"--{name}", value)]
    argv = (python, "hugging_face_training.py", *words)
    model = {"kind": "command", "argv": argv, "environment": {**ONE_THREAD, **environment}}
    return ProbeRequest(
        spec=CommandSpec.model_validate({"model": {**model, "working_directory": str(FOLDER)}}),
        micro_batch_size=2,
        samples_per_window=4,
        device="cpu",
        runs_plan=fresh,
    )


def measured(python: str, environment: Mapping[str, str], probes: int) -> dict[str, Any]:
    """The seconds of the first forked probe, and the medians of the next and of fresh ones."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    imports = None
    with CommandSupervisor(cpu()) as serving:
        for fresh in [False] + [False, True] * probes:
            with CommandSupervisor(cpu()) as alone:
                began = time.monotonic()
                result = (alone if fresh else serving).run(request(python, environment, fresh=fresh))
                seconds[fresh].append(time.monotonic() - began)
            if result.outcome is not Outcome.FIT or result.forked is fresh:
                raise SystemExit(f"{result.outcome}, forked: {result.forked}: {result.message}\n{result.traceback}")
            imports = result.shared_imports or imports
    return {
        "first": round(seconds[False][0], 2),
        "forked": round(median(seconds[False][1:]), 2),
        "fresh": round(median(seconds[True]), 2),
        "imports": imports and imports.model_dump(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure every way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=4, help="probes of each kind, whose median counts")
    options = parser.parse_args()
    print("| packages | first probe, s | forked, s | fresh, s | shared imports | load |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "venv": lambda _: (sys.executable, {}),
            ".pth": overlay,
            "PYTHONPATH": python_path,
            "editable": editable,
        }
        for name, prepare in ways.items():
            row = measured(*prepare(Path(folder) / name.strip(".")), options.probes)
            imports = row["imports"] or {"statements": 0, "place": "none"}
            cells = [name, row["first"], row["forked"], row["fresh"], f"{imports['statements']}, to {imports['place']}"]
            print("| " + " | ".join(map(str, [*cells, f"{row['load']:.1f}"])) + " |", flush=True)


if __name__ == "__main__":
    main()
