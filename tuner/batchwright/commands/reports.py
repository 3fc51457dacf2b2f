"""Read what the processes of a command report of themselves. No torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.schemas.results import MOST_NAMED_FILES, WrittenFiles

Event = dict[str, Any]


@dataclass
class ReportedProcess:
    """A Python process of a command's tree, as far as it has reported.

    Attributes:
        pid: the process.
        argv: the start of its command line; empty for a forked process.
        python: the version of its interpreter.
        torch: the version of its torch; none before that is imported.
        torch_at: when torch was imported, on the monotonic clock.
        forward_at: when its first forward pass began.
        waiting_passes: backward passes since its last step.
        has_optimizer: whether it had an optimizer at the last of these.
        idle_steps: steps of an optimizer without a backward pass.
        updates: its updates, in order.
        done: its report after the wanted updates, and after the micro-batch without the limit.
        ooms: what may be OOMs, in order.
        files: what it did to files outside of the probe's folders, in order.
        exit: its report at its own end, if it ended by itself after it had begun to train.
    """

    pid: int
    argv: tuple[str, ...] = ()
    python: str | None = None
    torch: str | None = None
    torch_at: float | None = None
    forward_at: float | None = None
    waiting_passes: int = 0
    has_optimizer: bool = True
    idle_steps: int = 0
    updates: list[Event] = field(default_factory=list)
    done: Event | None = None
    ooms: list[Event] = field(default_factory=list)
    files: list[Event] = field(default_factory=list)
    exit: Event | None = None

    def take(self, event: Event) -> None:
        """Take an event of this process."""
        match event["event"]:
            case "start":
                self.argv, self.python = tuple(event["argv"]), event["python"]
            case "torch":
                self.torch, self.torch_at = event["torch"], event["at"]
            case "forward":
                self.forward_at = self.forward_at or event["at"]
            case "backward":
                self.waiting_passes = event["waiting"]
                self.has_optimizer = event.get("optimizers", 1) > 0
            case "idle-step":
                self.idle_steps += 1
            case "update":
                self.updates.append(event)
                self.waiting_passes = 0
            case "oom":
                self.ooms.append(event)
            case "file":
                self.files.append(event)
            case "done" | "exit" as last:
                setattr(self, last, {**(getattr(self, last) or {}), **event})

    @property
    def rank(self) -> int:
        """The rank, by the last update."""
        return int(self.updates[-1]["rank"]) if self.updates else 0


class Reports:
    """The reports of all processes of a command, in the folder of the events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._processes: dict[int, ReportedProcess] = {}

    def read(self) -> None:
        """Read what has been reported since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            process = self._processes.setdefault(int(path.stem), ReportedProcess(int(path.stem)))
            for event in self._new_events(path):
                process.take(event)

    def _new_events(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as stream:
            stream.seek(self._offsets.get(path, 0))
            data = stream.read()
        # A process may be writing its last line now: that is read at the next call.
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(complete)
        for line in complete.splitlines():
            yield json.loads(line)

    @property
    def processes(self) -> list[ReportedProcess]:
        """All processes that have reported."""
        return list(self._processes.values())

    @property
    def with_torch(self) -> list[ReportedProcess]:
        """The processes that have imported torch."""
        return [process for process in self.processes if process.torch is not None]

    @property
    def trained(self) -> list[ReportedProcess]:
        """The processes that have made an update, by rank."""
        return sorted((process for process in self.processes if process.updates), key=lambda process: process.rank)

    @property
    def world_size(self) -> int:
        """The ranks of the run, as its processes say; 1 before the first update."""
        return max((int(update["world_size"]) for process in self.trained for update in process.updates), default=1)

    @property
    def in_forward(self) -> list[ReportedProcess]:
        """The processes that have begun a forward pass."""
        return [process for process in self.processes if process.forward_at is not None]

    @property
    def finished(self) -> list[ReportedProcess]:
        """The ranks that have made the wanted updates."""
        return [process for process in self.trained if process.done is not None]

    @property
    def are_finished(self) -> bool:
        """True once every rank has made the wanted updates."""
        return bool(self.finished) and len(self.finished) >= self.world_size

    @property
    def settles_until(self) -> float:
        """Until when finished ranks make a micro-batch more without the limit, on the monotonic clock; 0 if none."""
        done = [process.done for process in self.finished if process.done and process.done["trial_seconds"]]
        return max((event["at"] + event["trial_seconds"] for event in done), default=0.0)

    @property
    def oom(self) -> tuple[ReportedProcess, Event] | None:
        """The first OOM of any process."""
        found = [(process, event) for process in self.processes for event in process.ooms]
        return min(found, key=lambda each: each[1]["at"], default=None)

    @property
    def files(self) -> WrittenFiles | None:
        """What the processes did to files outside of the probe's folders; none where nothing was seen.

        What one process made, another may change.
        """
        names: dict[str, list[str]] = {}
        counts: dict[str, int] = {}
        for process in self.processes:
            for event in process.files:
                names.setdefault(event["how"], []).append(event["path"])
            for how in {event["how"] for event in process.files}:
                counts[how] = counts.get(how, 0) + max(each["count"] for each in process.files if each["how"] == how)
        if not counts:
            return None
        return WrittenFiles(
            **{how: tuple(dict.fromkeys(found))[:MOST_NAMED_FILES] for how, found in names.items()}, counts=counts
        )

    @property
    def forward_at(self) -> float | None:
        """Start of the first forward pass of any process."""
        return min((process.forward_at for process in self.processes if process.forward_at), default=None)

    @property
    def waiting_passes(self) -> int:
        """The most backward passes that a process has made since its last step."""
        return max((process.waiting_passes for process in self.processes), default=0)

    @property
    def has_optimizer(self) -> bool:
        """False if no process that waits for a step of an optimizer has one."""
        waiting = [process for process in self.processes if process.waiting_passes]
        return not waiting or any(process.has_optimizer for process in waiting)
