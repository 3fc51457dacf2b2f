"""The interface of trackers. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from batchwright.schemas.training import RunOutcome
from batchwright.system.files import write_atomically
from batchwright.training.launching.run_directory import RunPaths

Setting: TypeAlias = str | int | float
"""A setting of a run, as trackers list them."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker writes of. What a tracker writes on this host is below ``paths``."""

    paths: RunPaths
    name: str
    settings: Mapping[str, Setting]

    def ids(self) -> dict[str, str]:
        """The ids of the run in the trackers' own systems, by which a resumed process goes on with them."""
        try:
            return dict(json.loads(self.paths.tracked_runs.read_bytes()))
        except (OSError, ValueError):
            return {}

    def keep_id(self, tracker: str, identifier: str) -> str:
        """Keep and return the id of the run in a tracker."""
        write_atomically(self.paths.tracked_runs, json.dumps({**self.ids(), tracker: identifier}))
        return identifier


class Tracker(Protocol):
    """Writes the figures of one process of a run. The main rank alone has trackers."""

    def begin(self, resumed_from: int) -> None:
        """Go on after an update; what was written of later ones is made again."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures of the weights after an update."""

    def close(self, outcome: RunOutcome) -> None:
        """Write what is left, and say how the process ended."""
