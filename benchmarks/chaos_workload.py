"""The workload of ``chaos.py``: a small GPT whose processes tell that they have begun.

A process of a probe or of a training run calls ``build`` once. It notes in a journal what it is, and takes the lock
file of the device, which the kernel releases when they end: two at once on one device are seen however short it is.
Estimates and checks build it too; they use no device, and are noted as what they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from batchwright.probing.protocol import ProbePaths
from batchwright.schemas.workload import Gpt
from batchwright.workloads.base import Workload
from batchwright.workloads.reference import GptNetwork, NextTokenWorkload

FOLDER_VARIABLE = "CHAOS_FOLDER"
"""Names the folder of the journal and of the device's lock file."""

VOCABULARY_SIZE = 4096
_held: list[int] = []
"""Descriptors of lock files: open until the process ends."""


def build(layers: int, width: int, length: int, samples: int) -> Workload:
    """The target that the service is asked for."""
    journal = Path(os.environ[FOLDER_VARIABLE])
    what, size = _role()
    alone = _lock(journal / "device.lock") if what in {"probe", "training"} else True
    entry = {"at": time.time(), "pid": os.getpid(), "what": what, "size": size, "alone": alone}
    with (journal / "journal.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
    sizes = Gpt(name="gpt", layers=layers, heads=4, width=width, vocabulary_size=VOCABULARY_SIZE, dropout=0.1)
    return TokensWorkload(sizes, length, samples)


class TokensWorkload(NextTokenWorkload):
    """The reference GPT, and random tokens of a seed to train it on."""

    def __init__(self, sizes: Gpt, length: int, samples: int) -> None:
        super().__init__(lambda: GptNetwork(sizes, length, recompute=False), length, sizes.vocabulary_size)
        self._shape = (samples, length)

    def dataset(self) -> list[Tensor]:
        """The same samples each time."""
        generator = torch.Generator().manual_seed(1)
        return list(torch.randint(0, self.vocabulary_size, self._shape, generator=generator))


def _role() -> tuple[str, int | None]:
    """What this process is, and the micro-batch that it probes."""
    if Path(sys.argv[0]).parent.name == "training":
        return "training", None
    request = ProbePaths(Path(f"/proc/self/fd/{sys.stdout.fileno()}").resolve().parent).request
    if not request.exists():
        return "other", None
    asked = json.loads(request.read_bytes())
    return ("probe", int(asked["micro_batch_size"])) if "micro_batch_size" in asked else ("other", None)


def _lock(path: Path) -> bool:
    """Take the lock file, and whether nobody else had it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.append(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
