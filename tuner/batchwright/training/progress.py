"""Progress of a run: a line of JSON per update for machines, figures for trackers, and words for the run's log."""

from __future__ import annotations

from batchwright.schemas.training import TrainingProgress
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.launching.run_log import events, log
from batchwright.training.trackers.figures import figures_of
from batchwright.training.trackers.requested_trackers import Trackers


class ProgressWriter:
    """Writer of the progress of one process of a run.

    Args:
        paths: the run's files.
        resumed_from: the update that this process resumes from; lines of later updates are dropped.
        trackers: get the figures too.
        limit_bytes: the memory limit of a rank; none where there is none.
    """

    def __init__(self, paths: RunPaths, resumed_from: int, trackers: Trackers, limit_bytes: int | None) -> None:
        self._log = ProgressLog(paths.progress)
        self._log.truncate_after(resumed_from)
        self._trackers = trackers
        self._limit_bytes = limit_bytes
        self._told: tuple[str, ...] = ()
        newest = self._log.last()
        is_logged = newest is not None and newest.update == resumed_from
        self._tracked = self._names(newest) if newest is not None and is_logged else set()
        trackers.begin(resumed_from if is_logged or not resumed_from else resumed_from - 1)

    def append(self, progress: TrainingProgress) -> None:
        """Write an update to the disk before returning: a kill must not lose an update that a checkpoint has.

        An update that is there already is replaced, and trackers get the figures that are new.
        """
        for update, figures in figures_of(progress, self._limit_bytes).items():
            new = {name: value for name, value in figures.items() if (update, name) not in self._tracked}
            if new:
                self._trackers.log(update, new)
        self._log.append(progress)
        texts = tuple(events(progress))
        for text in texts:
            if text not in self._told:
                log(text)
        self._told = texts
        self._tracked = self._names(progress)

    def _names(self, progress: TrainingProgress) -> set[tuple[int, str]]:
        figures = figures_of(progress, self._limit_bytes)
        return {(update, name) for update, of_update in figures.items() for name in of_update}
