"""The workload of ``chaos.py``: a small GPT whose processes record that they have begun.

Each process of a probe or a training run calls ``build`` once. It appends its role to a journal, and takes a lock file
that the kernel releases when the process ends. Two processes that run the same work at once are found by the lock,
however short the overlap. Estimates and checks build the workload too: they are recorded, and take no lock.
"""

import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path

from batchwright.probing.protocol import ProbePaths
from batchwright.schemas.workload import Gpt
from batchwright.workloads.base import Workload
from batchwright.workloads.reference import GptNetwork, NextTokenWorkload

FOLDER_VARIABLE = "CHAOS_FOLDER"
"""Names the folder of the journal and of the lock files."""
_VOCABULARY_SIZE = 4096
_WORK = re.compile(r"(?:tun|job)_\w+")
_held: list[int] = []
"""Descriptors of lock files: open until the process ends."""


def build(layers: int, width: int, length: int) -> Workload:
    """Build the workload. This is the target of the spec."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    role, size = _role()
    work = _work()
    lock = folder / f"{work or 'device'}-{os.environ.get('RANK', '0')}.lock"
    alone = _is_locked(lock) if role in {"probe", "training"} else True
    entry = {"at": time.time(), "pid": os.getpid(), "work": work, "role": role, "size": size, "alone": alone}
    with (folder / "journal.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
    sizes = Gpt(name="gpt", layers=layers, heads=4, width=width, vocabulary_size=_VOCABULARY_SIZE, dropout=0.1)
    return NextTokenWorkload(lambda: GptNetwork(sizes, length, recompute=False), length, _VOCABULARY_SIZE)


def _role() -> tuple[str, int | None]:
    """Return the role of this process, and the micro-batch size that it probes."""
    if Path(sys.argv[0]).parent.name == "training":
        return "training", None
    request = ProbePaths(Path(f"/proc/self/fd/{sys.stdout.fileno()}").resolve().parent).request
    asked = json.loads(request.read_bytes()) if request.exists() else {}
    return ("probe", int(asked["micro_batch_size"])) if "micro_batch_size" in asked else ("other", None)


def _work() -> str:
    """Return the id of the work, as the command of an ancestor names it; empty under a worker of many tunings."""
    process = os.getpid()
    while process > 1:
        folder = Path("/proc", str(process))
        if found := _WORK.search((folder / "cmdline").read_bytes().decode(errors="replace")):
            return found[0]
        process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return ""


def _is_locked(path: Path) -> bool:
    """Take the lock file. Return False if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.append(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
