"""Retention: delete work that ended long ago, with the folders of its jobs on this host."""

from collections.abc import Iterable
from pathlib import Path

from batchwright.schemas.base import Document, NonNegativeInt
from batchwright_service.application.job_files import JobFiles
from batchwright_service.application.views import is_identifier
from batchwright_service.store.retention import RetentionStore


class PruneReport(Document):
    """The deleted work, or the work that a dry run would delete."""

    dry_run: bool
    """True when nothing was deleted."""
    tunings: NonNegativeInt
    """Number of tunings, with their probes and events."""
    jobs: NonNegativeInt
    """Number of jobs, with their events."""
    recommendations: NonNegativeInt
    """Number of recommendations that no work references."""
    job_ids: tuple[str, ...]
    """Identifiers of the jobs."""
    folders: tuple[str, ...]
    """Folders of these jobs on this host. Folders on other hosts stay there."""
    folders_left: tuple[str, ...] = ()
    """Folders that could not be removed completely."""


def prune(
    store: RetentionStore, files: JobFiles, seconds: float, *, recommendations: bool, dry_run: bool
) -> PruneReport:
    """Delete work that ended longer ago than ``seconds``, and its folders.

    A folder is removed before its job is deleted, so that the next call completes an interrupted one.

    Raises:
        StoreUnavailableError: when the database cannot be used.
    """
    pruned = store.prunable(seconds, recommendations=recommendations)
    folders = _folders(files, pruned.job_ids)
    if not dry_run:
        # Folders before rows: a repeated call finds a job without its folder, and never a folder without its job.
        _remove(files, pruned.job_ids)
        pruned = store.prune(seconds, recommendations=recommendations)
        folders |= _folders(files, pruned.job_ids)  # of jobs that have become old enough meanwhile
        _remove(files, pruned.job_ids)
    left = set() if dry_run else {folder for folder in folders if Path(folder).exists()}
    return PruneReport(
        dry_run=dry_run,
        tunings=pruned.tunings,
        jobs=pruned.jobs,
        recommendations=pruned.recommendations,
        job_ids=pruned.job_ids,
        folders=tuple(sorted(folders - left)),
        folders_left=tuple(sorted(left)),
    )


def _folders(files: JobFiles, job_ids: Iterable[str]) -> set[str]:
    here = (job_id for job_id in job_ids if is_identifier(job_id) and files.has_directory(job_id))
    return {str(files.directory(job_id)) for job_id in here}


def _remove(files: JobFiles, job_ids: Iterable[str]) -> None:
    for job_id in job_ids:
        if is_identifier(job_id):
            files.remove(job_id)
