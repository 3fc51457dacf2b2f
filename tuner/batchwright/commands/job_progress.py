"""Read what the processes of a command's job have counted. No torch."""

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from batchwright.commands.outcomes import is_oom
from batchwright.commands.reports import Event, Reports
from batchwright.schemas.training import CommandProgress


class JobReports:
    """The reports of a job's processes: their progress, towards a total if it is known, and every OOM."""

    def __init__(self, folder: Path, total: int | None) -> None:
        self._folder, self._total = folder, total
        self._events = Reports(folder)
        self._written: dict[str, Event] = {}

    def read(self) -> None:
        """Read what has been reported since the last call."""
        self._events.read()
        for path in self._folder.glob("*.progress"):
            with suppress(OSError, ValueError):
                self._written[path.stem] = json.loads(path.read_text())

    @property
    def progress(self) -> CommandProgress:
        """The updates of all ranks. Processes of one rank have run one after the other."""
        ranks: dict[int, list[Event]] = defaultdict(list)
        for process in self._written.values():
            ranks[process["rank"]].append(process)
        if not ranks:
            return CommandProgress(updates=self._total)
        rates = [rate for process in self._written.values() if (rate := _rate_of(process)) is not None]
        peaks = [peak for process in self._written.values() if (peak := _peak_bytes(process)) is not None]
        return CommandProgress(
            update=min(sum(process["updates"] for process in of_rank) for of_rank in ranks.values()),
            updates=self._total,
            world_size=max(process["world_size"] for process in self._written.values()),
            samples_seen=sum(process["samples"] for process in self._written.values()),
            unlike_plan=max(sum(process["unlike_plan"] for process in of_rank) for of_rank in ranks.values()),
            samples_per_second=sum(rates) if rates else None,
            peak_bytes=max(peaks, default=None),
        )

    @property
    def ooms(self) -> list[Event]:
        """The OOMs of all processes, in order."""
        found = [event for process in self._events.processes for event in process.ooms if is_oom(event)]
        return sorted(found, key=lambda event: float(event["at"]))

    @property
    def has_torch(self) -> bool:
        """True once a process has imported torch."""
        return bool(self._events.with_torch)


def _rate_of(process: Event) -> float | None:
    """Samples per second of a process since its first update."""
    seconds = process["last_at"] - process["first_at"]
    timed = process["samples"] * (process["updates"] - 1) / process["updates"]
    return float(timed / seconds) if seconds > 0.0 else None


def _peak_bytes(process: Event) -> int | None:
    """The peak of a process: on a card the reserved memory and the context, else that of the process."""
    reserved = process.get("reserved_bytes")
    if reserved is not None:
        return int(reserved) + int(process.get("context_bytes") or 0)
    peak = process.get("process_peak_bytes")
    return None if peak is None else int(peak)
