"""What a finder's process writes down as it goes, line by line: one that dies has told what it tried. No torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["fit", "oom", "error"]


@dataclass(frozen=True)
class Trial:
    """One size that was tried."""

    size: int
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Found:
    """What a finder's process did, from its start to its end."""

    answer: int | None
    """None when it ended without one; 0 when it found that nothing fits."""
    plan: int | None
    """The largest micro-batch of its plan; none where it plans nothing."""
    error: str | None
    """Why there is no answer."""
    trials: tuple[Trial, ...]
    seconds: float
    """Wall time of the whole process, the interpreter's start and every import included; where it wrote down that it
    was ready, from then on."""


class Diary:
    """The lines of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ready(self) -> None:
        """What a service has done before it is asked is done."""
        self._write({"ready": time.monotonic()})

    def tried(self, size: int, outcome: Outcome, seconds: float) -> None:
        """A trial has ended."""
        self._write({"size": size, "outcome": outcome, "seconds": seconds})

    def answered(self, answer: int, plan: int | None = None) -> None:
        """The finder's answer, and the largest micro-batch of its plan, if it plans."""
        self._write({"answer": answer, "plan": plan})

    def failed(self, error: str) -> None:
        """The finder has ended without an answer."""
        self._write({"error": error})

    def _write(self, line: Mapping[str, object]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """What was written so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def run_finder(command: Sequence[str], diary: Diary, environment: Mapping[str, str], timeout_seconds: float) -> Found:
    """Run a finder in a process of its own, and read what it wrote down."""
    output = diary.path.with_suffix(".txt")
    began = time.monotonic()
    with output.open("wb") as stream:
        try:
            status: int | str = subprocess.run(  # noqa: S603 - a file beside this one, by this interpreter
                command, env=dict(environment), stdout=stream, stderr=stream, timeout=timeout_seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {timeout_seconds:g} s"
    ended = time.monotonic()
    lines = diary.lines()
    began = next((line["ready"] for line in lines if "ready" in line), began)
    answer, plan = next(((line["answer"], line["plan"]) for line in lines if "answer" in line), (None, None))
    error = next((line["error"] for line in lines if "error" in line), None)
    if answer is None and error is None:
        error = f"ended with {status}: {output.read_text(errors='replace')[-500:].strip()}"
    return Found(answer, plan, error, tuple(Trial(**line) for line in lines if "size" in line), ended - began)
