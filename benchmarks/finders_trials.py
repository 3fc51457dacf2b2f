"""What a finder's process writes down as it goes, line by line: one that dies has told what it tried. No torch."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

Outcome = Literal["fit", "oom", "error"]
OUTCOMES: dict[str, Outcome] = {"FIT": "fit", "OOM": "oom"}
"""Outcomes of our own probes; any other one is an error."""
NEAR = 0.9
"""Share of the maximum from which on a peer's answer counts as near to it."""


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


def figures(truth: Mapping[str, Any], fits: Mapping[int, object], runs: Sequence[Found]) -> dict[str, Any]:
    """A finder's figures on one workload; of several runs, the last answer and medians."""
    last = runs[-1]
    return {
        "answer": last.answer,
        "answers": [run.answer for run in runs],
        "plan": last.plan,
        "error": last.error,
        "share": None if last.answer is None else round(last.answer / truth["largest"], 4),
        "fits": fits.get(last.answer or 0),
        "exact": all(truth["largest"] <= (run.answer or 0) <= truth["largest_ever"] for run in runs),
        "probes": median(len(run.trials) for run in runs),
        "ooms": median(sum(trial.outcome == "oom" for trial in run.trials) for run in runs),
        "seconds": round(median(run.seconds for run in runs), 2),
        "seconds_in_trials": round(median(sum(trial.seconds for trial in run.trials) for run in runs), 2),
        "trials": [[trial.size, trial.outcome, round(trial.seconds, 3)] for trial in last.trials],
    }


def cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a table: the answer and its share of the maximum, whether it fits, probes, OOMs and seconds."""
    answer = (
        (f"none ({found['error']})", "-") if found["answer"] is None else (found["answer"], f"{found['share']:.1%}")
    )
    fits = "-" if found["fits"] is None else str(found["fits"])
    seconds = (f"{found['seconds']:.1f}", f"{found['seconds_in_trials']:.1f}")
    return (*answer, fits, f"{found['probes']:g}", f"{found['ooms']:g}", *seconds)
