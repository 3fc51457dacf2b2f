"""Evidence from a CUDA card for what is claimed about CUDA: one command of twenty minutes at most, one JSON file.

python benchmarks/gpu_evidence.py [--card 0] [--parts NAME ...] [--output FILE] [--time-factor FACTOR]

The parts (gpu_evidence_parts.py), each in a process of its own with a time limit of its own, in their order:

- versions: of the packages, the driver, CUDA, cuDNN and NCCL, and the settings that decide which kernels run
- context: the memory of a process outside torch's allocator, and how it grows with the libraries that are used
- tunings: five tunings, their estimates, and the measured peaks of tensors, of the allocator and of the process
- jobs: eleven jobs at one size each: what their probes, their estimates and the jobs themselves take
- workspaces: the memory of operators beside their results, by operator and shape, against what estimates assume
- nccl: the memory of a communicator of two cards outside the allocator, where there are two
- finders: our search and the peers' on one workload, and whether each answer fits

A part that fails, or is ended at its limit, leaves what it had found and its failure in the file, and the next one
begins. The file is written as soon as a part finds something, so that a run that is cut off leaves what it had found,
with the status `running` of its last part: under $OUT if that is set, else in benchmarks/results/gpu/, named by the
card, torch and the driver. On a virtual card (`batchwright.virtual_gpu`) it is marked `"virtual": true` and goes to
runs/gpu_evidence/, because nothing seen there is a measurement of a GPU; time limits are four times as long there,
because the host's processors do the work of the card. Without a card the exit code is 1.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.errors import DeviceError
from batchwright.hardware.inventory import devices, find_device
from batchwright.planning.fingerprint import installed_versions
from batchwright.schemas.results import DeviceInfo
from batchwright.system.files import write_atomically

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOTAL_SECONDS = 1195.0
"""Time for all parts. A part whose own limit is longer than what is left gets what is left."""
PARTS = {
    "versions": 30.0,
    "context": 30.0,
    "tunings": 280.0,
    "jobs": 660.0,
    "workspaces": 40.0,
    "nccl": 20.0,
    "finders": 130.0,
}
"""Time limits in seconds, the most valuable part first: a card may be taken away at any time."""
_WRITE_SECONDS = 1.0
"""Time between two looks at what the running part has found so far."""
VIRTUAL_TIME_FACTOR = 4.0
"""Factor of the time limits on a virtual card, unless another one is given."""
_OUTPUT_LENGTH = 2000
_VIRTUAL = "VIRTUAL_GPU_SESSION"
"""Variable that is set in a process that sees virtual cards."""
Row = dict[str, Any]


def is_virtual(environment: Mapping[str, str]) -> bool:
    """Return whether the cards of this process are virtual."""
    return _VIRTUAL in environment


def run_part(name: str, device: DeviceInfo, seconds: float, report: Callable[[Row], None] = lambda _row: None) -> Row:
    """Run a part in a process group of its own, and return what it found and how it ended.

    ``report`` is called with what it has found so far, whenever that has changed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, output = Path(folder) / "found.json", Path(folder) / "output.txt"
        command = [sys.executable, str(HERE / "gpu_evidence_parts.py"), name, device.id, str(found)]
        with output.open("wb") as stream:
            process = subprocess.Popen(  # noqa: S603 - a file beside this one, by this interpreter
                command, stdout=stream, stderr=stream, env=_environment(), cwd=ROOT, start_new_session=True
            )
            ending = _ending(process, seconds, found, report)
        result = _read(found)
        words = output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_LENGTH:].strip()
    row = {"status": ending, "seconds": round(time.monotonic() - began, 1)}
    if (skipped := result.pop("skipped", None)) is not None:
        row |= {"status": "skipped", "message": skipped}
    elif ending != "done":
        row["message"] = f"{_failure(ending, process.returncode, seconds)}\n{words}".strip()
    return {**row, "result": result}


def _read(found: Path) -> Row:
    """Return what a part has found so far; the file is replaced as a whole."""
    result: Row = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    return result


def _environment() -> dict[str, str]:
    """The environment of a part: it imports the repository, the targets of the finders, and what this process does."""
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _ending(process: subprocess.Popen[bytes], seconds: float, found: Path, report: Callable[[Row], None]) -> str:
    """Wait for a part, and end its whole group, also if this process is ended; "done", "failed" or "timed-out"."""
    began, reported = time.monotonic(), Row()
    try:
        while (left := began + max(1.0, seconds) - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return "done" if process.wait(timeout=min(left, _WRITE_SECONDS)) == 0 else "failed"
            if (result := _read(found)) != reported:
                reported = result
                report({"status": "running", "seconds": round(time.monotonic() - began, 1), "result": result})
        return "timed-out"
    finally:
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(ending: str, code: int, seconds: float) -> str:
    if ending == "timed-out":
        return f"ended at its limit of {seconds:.0f} s"
    return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def output_path(device: DeviceInfo, versions: Mapping[str, str], *, virtual: bool) -> Path:
    """Return the path of the file, named by the card, torch and the driver."""
    words = (device.name, f"torch-{versions.get('torch', 'unknown')}", f"driver-{device.driver_version or 'unknown'}")
    name = "_".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words) + ".json"
    if virtual:
        return ROOT / "runs" / "gpu_evidence" / f"virtual_{name}"
    return (Path(os.environ["OUT"]) if os.environ.get("OUT") else HERE / "results" / "gpu") / name


def measure(device: DeviceInfo, options: argparse.Namespace) -> Row:
    """Run the parts in order, and write the file after each."""
    versions, virtual = installed_versions(), is_virtual(os.environ)
    path = options.output or output_path(device, versions, virtual=virtual)
    factor = options.time_factor if options.time_factor is not None else VIRTUAL_TIME_FACTOR if virtual else 1.0
    document: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/gpu_evidence.py", *sys.argv[1:]]),
        "virtual": virtual,
        "time_factor": factor,
        "device": device.model_dump(mode="json"),
        "versions": versions,
        "parts": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    deadline = began + TOTAL_SECONDS * factor

    def write(name: str, row: Row) -> None:
        document["parts"][name] = row
        document["seconds"] = round(time.monotonic() - began, 1)
        write_atomically(path, json.dumps(document, indent=1) + "\n")

    for name in options.parts:
        left = deadline - time.monotonic()
        seconds = min(PARTS[name] * factor, left)
        row: Row = {"status": "timed-out", "seconds": 0.0, "message": "no time was left to begin", "result": {}}
        if left > 0:
            row = run_part(name, device, seconds, partial(write, name))
        write(name, row)
        last_line = str(row.get("message", "")).rpartition("\n")[2][:100]
        print(f"{name:12}{row['status']:10}{row['seconds']:6.1f} s  {last_line}", flush=True)
    print(f"written: {path}{' (a virtual card: no measurement of a GPU)' if virtual else ''}")
    return document


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", type=int, default=0, help="the number of the card; the first one when left out")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these")
    parser.add_argument("--output", type=Path, help="the file to write")
    parser.add_argument("--time-factor", type=float, help="multiplies every time limit; 1, or 4 on a virtual card")
    options = parser.parse_args()
    try:
        device = find_device(f"cuda:{options.card}")
    except DeviceError as error:
        print(f"no evidence without a CUDA card: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running part, and its processes
    print(f"{device.id}: {device.name}, of {len(devices()) - 1} on this host")
    found = measure(device, options)
    return 0 if any(row["status"] == "done" for row in found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
