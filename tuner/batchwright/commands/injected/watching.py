"""Watch a process of a job once torch is imported: its updates, its peak and its OOMs. It has no limit and no end here.

A job runs for hours, so that nothing is kept of an update but its figures in sums, the card's queue is not waited for,
and no trace function slows the program down.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

from .counting import Update, UpdateCounter
from .memory import StartMemory, memory_of
from .oom_watch import OomWatch
from .reporting import report, write_progress
from .torch_hooks import ModelCall, Observer, rank_and_world_size

_WRITE_SECONDS = 0.1
"""Shortest time between two writings of the progress, each of which takes about a tenth of a millisecond."""


class WatchedProcess(Observer):
    """This process of a job, from the import of torch to its end.

    Peaks count from the memory at the ``start``.
    """

    def __init__(
        self, torch: Any, folder: str, settings: dict[str, Any], start: StartMemory, data_sets: set[int]
    ) -> None:
        del data_sets  # of a job nobody asks
        self._torch = torch
        self._folder = folder
        self._settings = settings
        self._memory = memory_of(torch, settings, start)
        self._ooms = OomWatch(settings["oom_texts"], self._report_oom)
        self._reset()

    def _reset(self) -> None:
        """Count from the beginning, as a forked process does."""
        self._counter = UpdateCounter(0)
        self._updates, self._samples, self._unlike_plan, self._first_optimizer = 0, 0, 0, 0
        self._first_at = self._last_at = self._written_at = 0.0
        self._peak_bytes = 0

    def start(self) -> None:
        """Install everything."""
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self._write)
        self._ooms.watch_uncaught()
        if self._memory.is_of_card:
            self._ooms.watch_card(self._torch)
        self._memory.limit()

    # --- what the hooks see ---

    def went_backward(self, call: ModelCall | None, drawn: dict[str, int | None], reached: dict[str, int]) -> None:
        """Count a backward pass."""
        del reached  # of a job nobody asks
        self._counter.backward(call.shape if call else None, drawn)

    def discarded(self, optimizer: Any) -> None:
        """Count gradients that are set to zero."""
        self._counter.discard(id(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """Count a step that ends an update."""
        now = time.monotonic()
        if not self._counter.step(id(optimizer), now):
            return
        self._take(self._counter.updates.pop())
        self._first_at = self._first_at or now
        self._last_at = now
        if now - self._written_at >= _WRITE_SECONDS:
            self._memory.check_devices()
            self._memory.follow_contexts()
            self._write()

    def _take(self, update: Update) -> None:
        """Add an update of the optimizer that stepped first, and compare it with what was counted for the plan."""
        self._first_optimizer = self._first_optimizer or update.optimizer
        if update.optimizer != self._first_optimizer:
            return
        planned, expected = self._settings["samples_per_rank"], self._settings["samples_by_source"]
        is_planned = any(count == expected.get(source, planned) for source, count in update.samples.items())
        follows = update.backward_passes == self._settings["backward_passes"] and (is_planned or not update.samples)
        self._updates += 1
        self._samples += planned if follows or not update.samples else next(iter(update.samples.values()))
        self._unlike_plan += not follows

    def failed(self, error: BaseException, where: str) -> None:
        """Look at an exception that passes a hooked function."""
        self._ooms.saw(error, where)

    # --- reports ---

    def _write(self) -> None:
        """Write the progress, if this process has made an update."""
        if not self._updates:
            return
        self._written_at = time.monotonic()
        rank, world_size = rank_and_world_size(self._torch)
        write_progress(
            self._folder,
            rank=rank,
            world_size=world_size,
            updates=self._updates,
            samples=self._samples,
            unlike_plan=self._unlike_plan,
            first_at=self._first_at,
            last_at=self._last_at,
            **self.peaks(),
        )

    def peaks(self) -> dict[str, int | None]:
        """Return the largest peaks read so far. On the CPU a later reading is smaller by files mapped since."""
        found = self._memory.peaks()
        if "process_peak_bytes" in found:
            self._peak_bytes = found["process_peak_bytes"] = max(self._peak_bytes, found["process_peak_bytes"] or 0)
        return found

    def _report_oom(self, kind: str, message: str, where: str) -> None:
        self._write()
        rank, _ = rank_and_world_size(self._torch)
        made = {"type": kind, "message": message, "where": where, "rank": rank, "updates": self._updates}
        report(self._folder, "oom", pid=os.getpid(), **made, **self.peaks())
