"""Recorded reports of the processes of programs, and their replay to a supervisor without the programs.

`python -m tests.commands.recorded [NAME ...]` runs the programs of `CASES` and renews their records in `reports/`: read
what changed before you keep it. A record has the events of all processes in order, the end of the command, and no path
of the machine. Times count from the start of the probe.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from batchwright.commands import command_probe, command_supervisor
from batchwright.commands.command_job import CommandJob
from batchwright.commands.command_probe import CommandProbe
from batchwright.commands.launching import FreshCommand, Launch
from batchwright.commands.outcomes import EndedCommand
from batchwright.hardware.inventory import cpu
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import Headroom, Recommendation
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.training import TrainingResult
from batchwright.system.files import tail
from batchwright.system.kept_process import KeptProcess
from batchwright.system.temporary_folders import TemporaryFolder
from tests.commands.program_list import PLAIN, Program, misbehaving
from tests.commands.trials import probe_request
from tests.support.exports.plans import command_plan
from tests.support.factories import CPU
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "commands" / "reports"
SIZE = 2
LARGE = 10
TIGHT = 160 * 1024**2
"""Too little for `LARGE` samples, which take 190 MiB, and enough for half of them, which take 130."""
_LONGEST_OUTPUT = 2000
_ABOVE_PROCESSES = 2**22
"""Highest process id of Linux: the processes of a replay have higher ones, so that nothing real gets a signal."""
_TIMES = ("at", "ended_at", "first_at", "last_at")

Record = dict[str, Any]
"""A document of `reports/`."""


@dataclass(frozen=True)
class Case:
    """A probe: its program, and the fields of its request."""

    program: Program
    size: int = SIZE
    limit_bytes: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, folder: Path) -> ProbeRequest:
        """Return the request. A program of `misbehaving_loop.py` names a place in the folder in its command line."""
        own = ("--output-dir", str(folder / "given")) if "misbehaving_loop.py" in self.program.argv else ()
        program = replace(self.program, argv=(*self.program.argv, *own))
        return probe_request(program, self.size, self.limit_bytes, **{"timeout_seconds": 120.0, **self.fields})


_ALIKE = (
    *("ignores-accumulation", "drops-the-last-micro-batch", "multiplies-by-the-ranks", "forks-loader-workers"),
    *("executes-another-interpreter", "starts-a-shell", "steps-by-hand", "never-steps", "steps-without-backward"),
    *("ends-early", "ends-at-once", "raises"),
)
"""Ways whose cases differ in nothing else."""
_NO_ACCUMULATION = tuple(
    "1" if word == "{gradient_accumulation_steps}" else word for word in misbehaving("updates-nothing").argv
)
CASES: dict[str, Case] = {
    **{way: Case(misbehaving(way)) for way in _ALIKE},
    "swallows-oom": Case(misbehaving("swallows-oom"), LARGE, TIGHT),
    "swallows-no-oom": Case(misbehaving("swallows-oom"), LARGE // 2, TIGHT),
    "hangs-after-the-oom-of-a-rank": Case(
        misbehaving("hangs-after-the-oom-of-a-rank", ranks=2), LARGE // 2, 5 * TIGHT // 4
    ),
    "oom-of-another-interpreter": Case(misbehaving("executes-another-interpreter"), LARGE, TIGHT),
    "oom-behind-a-shell": Case(misbehaving("starts-a-shell"), LARGE, TIGHT),
    "has-no-optimizer": Case(replace(misbehaving("updates-nothing"), argv=_NO_ACCUMULATION)),
    "two-ranks": Case(next(program for program in PLAIN if program.name == "DDP")),
    "isolated": Case(misbehaving("ends-early", isolated=True)),
    "no-python": Case(Program("other", ("/bin/echo", "{micro_batch_size}"))),
    "no-torch": Case(Program("other", (sys.executable, "-c", "pass", "{micro_batch_size}"))),
    "hangs-before-the-first-pass": Case(
        replace(misbehaving("hangs-before-the-first-pass"), loading_timeout_seconds=30.0)
    ),
    "hangs-after-the-first-pass": Case(misbehaving("hangs-after-the-first-pass"), fields={"timeout_seconds": 2.0}),
}
"""Probes by the name of their record."""


MEBIBYTE = 1024**2
_TRAINS = """
import json, os, sys, torch
size, steps, updates = (int(text) for text in sys.argv[1:4])
mode = os.environ.get("MODE")
class Wide(torch.nn.Linear):
    def forward(self, batch):
        if mode == "caught" and made == 2: torch.empty(1 << 50)
        return super().forward(batch)
model = Wide(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for made in range(updates):
    for _ in range(steps + (mode == "more" and made == 1)):
        try: model(torch.randn(size, 8)).sum().backward()
        except RuntimeError: pass
    optimizer.step(); optimizer.zero_grad()
    print("made", made, flush=True)
    if mode == "large" and made == 1: torch.ones(400 * 2**18)
    if mode == "oom" and made == 1: torch.empty(1 << 50)
"""
JOBS = ("plain", "large", "more", "caught", "oom")
"""Modes of a program whose jobs are recorded, each as `job-MODE`."""


# --- recording ---


def run_case(name: str, folder: Path) -> tuple[EndedCommand, Record]:
    """Run the program of a case in a process of its own, in an empty folder, and record its probe.

    As in a supervisor the probe's own folder is a temporary one.
    """
    request = CASES[name].request(folder)
    with TemporaryFolder() as own:
        started: list[FreshCommand] = []

        def start(launch: Launch, folder: Path) -> FreshCommand:
            started.append(FreshCommand(launch, folder))
            return started[0]

        ended = _probe(request, own).run(start, lambda: False)
        return ended, {
            "ending": ended.ending.name,
            "seconds": round(ended.ended_at - ended.requested_at, 3),
            "unreached": [_without_paths(line) for line in ended.unreached],
            **record_of(started[0], own, ended.requested_at),
        }


def _probe(request: ProbeRequest, folder: Path) -> CommandProbe:
    assert isinstance(request.spec, CommandSpec)
    return CommandProbe(request, request.spec, cpu(), folder)


def of_program(tmp_path: Path, code: str, *arguments: str, **fields: Any) -> Recommendation:
    """The recommendation of a program, with two micro-batches of 8 samples and a limit of 300 MiB."""
    script = tmp_path / "program.py"
    script.write_text(code)
    found = command_plan(sys.executable, str(script), *arguments, device=CPU, **fields)
    headroom = Headroom(limit_bytes=300 * MEBIBYTE, peak_bytes=1, free_bytes=1, free_fraction=0.5)
    return found.model_copy(update={"headroom": headroom})


def result_of_running(job: CommandJob) -> TrainingResult:
    """Wait for the end of a job; pytest's limit ends a wait in vain."""
    while (result := job.poll()) is None:
        time.sleep(0.02)
    return result


def plan_of_job(mode: str, folder: Path) -> Recommendation:
    """The recommendation of the program of a job, in one of its modes."""
    sizes = ("{micro_batch_size}", "{gradient_accumulation_steps}", "{updates}")
    return of_program(folder, _TRAINS, *sizes, environment={"MODE": mode})


def run_job(mode: str, folder: Path) -> tuple[TrainingResult, Record]:
    """Run a job of four updates in an empty folder, and record it."""
    began = time.monotonic()
    with CommandJob(folder / "job") as job:
        job.start(plan_of_job(mode, folder), 4)
        result = result_of_running(job)
        return result, {"ending": result.outcome.name, **record_of(job._command, job._folder, began, job.paths.log)}


def record_of(command: FreshCommand | None, folder: Path, began: float, log: Path | None = None) -> Record:
    """Record how a command ended, and what its processes have left in the folder of its probe or job.

    Args:
        command: the command, which has ended.
        folder: the folder.
        began: start of the command, on the monotonic clock.
        log: the output of the command; by default that of a probe.
    """
    found = [
        (int(path.stem), json.loads(line))
        for path in (folder / "events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    found.sort(key=lambda each: float(each[1]["at"]))
    numbers: dict[int, int] = {}
    for process, _ in found:
        numbers.setdefault(process, len(numbers) + 1)
    progress = {int(path.stem): json.loads(path.read_text()) for path in (folder / "events").glob("*.progress")}
    stacks = {int(path.stem): path.read_text() for path in (folder / "events").glob("*.stacks")}
    output = log or folder / "output.txt"
    error = command and command.error
    return {
        "exit": command and ({"error": error} if error else {"status": command.status}),
        "output": _without_paths(tail(output, _LONGEST_OUTPUT)) if output.exists() else "",
        "stacks": {str(numbers[process]): _without_paths(text) for process, text in stacks.items() if text},
        "progress": {str(numbers[process]): _moved(event, -began) for process, event in progress.items()},
        "events": [{"process": numbers[process], **_recorded(event, began)} for process, event in found],
    }


def _recorded(event: Mapping[str, Any], began: float) -> dict[str, Any]:
    kept = {name: value for name, value in event.items() if name != "pid"}
    if "argv" in kept:
        kept["argv"] = [Path(word).name if "/" in word else word for word in kept["argv"]]
    return _moved(kept, -began)


def _moved(event: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Move the times of an event."""
    return {name: round(value + seconds, 4) if name in _TIMES else value for name, value in event.items()}


def _without_paths(text: str) -> str:
    """Leave the last part of each absolute path."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"`:]+/)+", "", text)


def stored(name: str) -> Record:
    """Read a record."""
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def store(name: str, record: Record) -> None:
    """Write a record, with a line for each event."""
    rest = json.dumps({**record, "events": []}, indent=1, sort_keys=True)
    lines = ",\n  ".join(json.dumps(event) for event in record["events"])
    (FOLDER / f"{name}.json").write_text(rest.replace('"events": []', f'"events": [\n  {lines}\n ]') + "\n")


def shape(record: Record) -> dict[str, Any]:
    """The part of a record that every run has: how it ended, and its kinds of events with the types of their fields.

    The end of a process is left out, before which it may be killed.
    """
    events: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    seen = [event for event in record["events"] if event["event"] != "exit"]
    for event in [*seen, *({"event": "progress", **written} for written in record["progress"].values())]:
        for name, value in event.items():
            events[event["event"]][name].add(type(value).__name__)
    return {
        **{name: record.get(name) for name in ("ending", "exit")},
        "has": {name: bool(record.get(name)) for name in ("unreached", "stacks", "output")},
        "events": {name: dict(fields) for name, fields in events.items()},
    }


# --- replaying ---


class Clock:
    """A clock that only a replay moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """As ``time.monotonic``."""
        return self.now


class Replay(KeptProcess):
    """A command that writes a record again instead of running. A ``Launcher``, and the process that it starts.

    Args:
        record: the record.
        clock: is moved by what is waited.
    """

    def __init__(self, record: Record, clock: Clock) -> None:
        no_channel: Any = None
        super().__init__(no_channel, lambda: None)
        self.status, self.error = ((record["exit"] or {}).get(name) for name in ("status", "error"))
        self._record, self._clock, self._began = record, clock, clock.now
        self._left = list(record["events"])

    def __call__(self, launch: Launch, folder: Path) -> Replay:
        """Write what a probe finds there, all but the events."""
        self._events = folder / "events"
        for number, text in self._record["stacks"].items():
            self._path(number, "stacks").write_text(text)
        for number, event in self._record["progress"].items():
            self._path(number, "progress").write_text(json.dumps(_moved(event, self._began)))
        Path(launch.get("log", folder / "output.txt")).write_text(self._record["output"])
        return self

    def _path(self, number: object, suffix: str) -> Path:
        return self._events / f"{_ABOVE_PROCESSES + int(str(number))}.{suffix}"

    def wait(self, seconds: float) -> bool:
        """Let time pass, and write the events of that time. Return whether the command has ended by itself."""
        self._clock.now += seconds
        passed = self._clock.now - self._began
        while self._left and (not seconds or self._left[0]["at"] <= passed):
            event = self._left.pop(0)
            with self._path(event["process"], "jsonl").open("a") as stream:
                stream.write(json.dumps(_moved(event, self._began)) + "\n")
        return not self._left and (self.status is not None or self.error is not None)

    def end(self, *, dumps_stacks: bool = False) -> None:
        """Do nothing."""


def replay(name: str, folder: Path) -> EndedCommand:
    """Follow the probe of a case by its record, in an empty folder. No process is started, and no time passes."""
    record, clock = stored(name), Clock()
    request = CASES[name].request(folder)
    own = folder / "replay"
    own.mkdir()
    with _time_of(clock), patch("batchwright.commands.stacks._WRITING_SECONDS", 0.0):
        ended = _probe(request, own).run(Replay(record, clock), lambda: False)
    return replace(ended, unreached=record["unreached"])


@contextmanager
def replayed_commands(name: str) -> Iterator[None]:
    """Within the block every fresh start of a command is a replay of one record."""
    clock = Clock()
    with _time_of(clock), patch.object(command_supervisor, "FreshCommand", Replay(stored(name), clock)):
        yield


def _time_of(clock: Clock) -> AbstractContextManager[object]:
    return patch.object(command_probe, "time", SimpleNamespace(monotonic=clock.monotonic))


def _renew(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            mode = name.removeprefix("job-")
            _, record = run_case(name, Path(folder)) if mode == name else run_job(mode, Path(folder))
        store(name, record)
        print(name, record["ending"])  # noqa: T201


if __name__ == "__main__":
    _renew(sys.argv[1:] or [*CASES, *(f"job-{mode}" for mode in JOBS)])
