"""Retention: deletes what ended long ago, with the folders that its jobs left on this host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from service.application.job_files import RunFiles
from service.application.views import is_identifier
from service.store.interface import RetentionStore
from tuner.schemas.base import Document, NonNegativeInt


class PruneReport(Document):
    """What was deleted, or would be."""

    dry_run: bool
    """Whether nothing was deleted."""
    tunings: NonNegativeInt
    """Tunings, with their probes and events."""
    jobs: NonNegativeInt
    """Jobs, with their events."""
    recommendations: NonNegativeInt
    """Recommendations that nothing names any more."""
    job_ids: tuple[str, ...]
    """The jobs."""
    folders: tuple[str, ...]
    """Folders of these jobs on this host: those of jobs that ran on another host stay there."""
    folders_left: tuple[str, ...] = ()
    """Folders that could not be removed whole."""


def prune(
    store: RetentionStore, runs: RunFiles, seconds: float, *, recommendations: bool, dry_run: bool
) -> PruneReport:
    """Delete work that ended longer ago than that, and its folders.

    A folder goes before its job does: when this is interrupted, the next time finds the rest.

    Raises:
        StoreUnavailableError: when the database cannot be used.
    """
    would = store.prunable(seconds, recommendations=recommendations)
    folders = _folders(runs, would.job_ids)
    if not dry_run:
        _remove(runs, would.job_ids)
        would = store.prune(seconds, recommendations=recommendations)
        folders |= _folders(runs, would.job_ids)  # of what has become old enough meanwhile
        _remove(runs, would.job_ids)
    left = set() if dry_run else {it for it in folders if Path(it).exists()}
    return PruneReport(
        dry_run=dry_run,
        tunings=would.tunings,
        jobs=would.jobs,
        recommendations=would.recommendations,
        job_ids=would.job_ids,
        folders=tuple(sorted(folders - left)),
        folders_left=tuple(sorted(left)),
    )


def _folders(runs: RunFiles, job_ids: Iterable[str]) -> set[str]:
    return {str(runs.directory(it)) for it in job_ids if is_identifier(it) and runs.are_here(it)}


def _remove(runs: RunFiles, job_ids: Iterable[str]) -> None:
    for job_id in job_ids:
        if is_identifier(job_id):
            runs.remove(job_id)
