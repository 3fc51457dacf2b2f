"""The interface of trackers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from batchwright.schemas.training import RunOutcome
from batchwright.training.launching.run_directory import RunPaths

Setting: TypeAlias = str | int | float
"""A setting of a run, as trackers list them."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker writes of.

    Attributes:
        paths: the run's files. What a tracker writes on this host is below them.
        name: name of the run.
        settings: its settings, by name.
    """

    paths: RunPaths
    name: str
    settings: Mapping[str, Setting]


class Tracker(Protocol):
    """Writes the figures of one process of a run. The main rank alone has trackers."""

    def begin(self, resumed_from: int) -> None:
        """Go on after an update; what was written of later ones is made again."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures of the weights after an update."""

    def close(self, outcome: RunOutcome) -> None:
        """Write what is left, and say how the process ended."""
