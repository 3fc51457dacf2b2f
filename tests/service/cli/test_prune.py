"""`batchwright admin prune`, as an operator meets it."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchwright.client.documents.states import WorkKind
from batchwright_service.application.job_files import JobFiles
from batchwright_service.application.retention import PruneReport, prune
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.store import Store, open_store
from tests.support.command import called
from tests.support.service.scripted import new_work
from tests.support.service.stores import answered, ended, set_work

DAY = 86_400.0
LONG_AGO = 1


@dataclass
class Kept:
    """A service's data, without a service."""

    data_dir: Path
    store: Store

    @property
    def url(self) -> str:
        """Return the path of its database."""
        return f"sqlite:///{self.data_dir / 'batchwright.db'}"

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self.data_dir / "runs" / job_id

    def job(self, ended_at: int | None) -> str:
        """A job with a folder that has something in it."""
        job_id = IdentifierSource().new("job")
        ended(self.store, new_work(job_id, WorkKind.JOB))
        if ended_at is not None:
            set_work(self.url, job_id, ended_at=ended_at)
        (self.folder(job_id) / "checkpoints").mkdir(parents=True)
        (self.folder(job_id) / "checkpoints/weights").write_text("weights")
        return job_id

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command's answer, on the data folder of the settings."""
        return called("admin", "prune", *arguments, BATCHWRIGHT_DATA_DIR=str(self.data_dir))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """An empty data folder with a store."""
    store = open_store(f"sqlite:///{tmp_path / 'batchwright.db'}")
    yield Kept(tmp_path, store)
    store.close()


def test_old_work_goes_with_its_folders(kept: Kept) -> None:
    """First it is said what would go, then it goes; young jobs and their folders stay, and so do recommendations."""
    old, young = kept.job(LONG_AGO), kept.job(None)
    answer = answered(kept.store, IdentifierSource().new)
    set_work(kept.url, str(kept.store.recommendations.tuning_with(answer.fingerprint)), ended_at=LONG_AGO)
    said = kept.command("--older-than", "30d", "--dry-run")
    assert said.stdout.splitlines() == [
        "Would delete 1 tuning, 1 job, 0 recommendations, 1 folder:",
        f"  {kept.folder(old)}",
    ]
    assert kept.folder(old).exists()
    done = kept.command("--older-than", "30d", "--json")
    report = PruneReport.model_validate_json(done.stdout)
    assert report == PruneReport(
        dry_run=False, tunings=1, jobs=1, recommendations=0, job_ids=(old,), folders=(str(kept.folder(old)),)
    )
    assert [row.id for row in kept.store.work.newest(WorkKind.JOB, 5)] == [young]
    assert sorted(path.name for path in kept.folder(young).parent.iterdir()) == [young]
    assert kept.store.recommendations.get(answer.id) == answer
    again = json.loads(kept.command("--older-than", "30d", "--recommendations", "--json").stdout)
    assert (again["tunings"], again["jobs"], again["recommendations"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--older-than"),
        (("--older-than", "30"), "30d"),
        (("--older-than", "-3d"), "30d"),
        (("--older-than", "4000d"), "years"),
        (("--older-than", "9" * 400 + "d"), "years"),
        (("--older-than", "1d", "--database-url", "mysql://user:s3cr3t@host/db"), "database_url"),
    ],
)
def test_what_is_wrong_is_said(kept: Kept, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2, or that of a service that cannot be used; nothing is deleted, no password is shown."""
    job_id = kept.job(LONG_AGO)
    ended_so = kept.command(*arguments)
    assert ended_so.returncode != 0
    assert word in ended_so.stderr
    assert "s3cr3t" not in ended_so.stderr + ended_so.stdout
    assert kept.folder(job_id).exists()
    assert kept.store.work.get(job_id).id == job_id


def test_nothing_outside_the_runs_is_removed(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job whose folder is a link loses no more than its row; an id that is no identifier names no folder."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").write_text("data")
    linked = kept.job(LONG_AGO)
    kept.folder(linked).rename(kept.data_dir / "moved")
    kept.folder(linked).symlink_to(outside)
    ended(kept.store, new_work("..", WorkKind.JOB))
    report = prune(kept.store.retention, JobFiles(kept.data_dir / "runs"), 0.0, recommendations=False, dry_run=False)
    assert (report.jobs, report.folders) == (2, ())
    assert (outside / "precious").read_text() == "data"
    assert (kept.data_dir / "batchwright.db").exists()


def test_an_interrupted_prune_is_finished_by_the_next(kept: Kept) -> None:
    """Folders go before their jobs: what has lost its folder is still there to be deleted."""
    job_id = kept.job(LONG_AGO)
    runs = JobFiles(kept.data_dir / "runs")
    runs.remove(job_id)
    assert prune(kept.store.retention, runs, DAY, recommendations=False, dry_run=False).job_ids == (job_id,)


def test_a_folder_that_cannot_be_removed_is_named(kept: Kept) -> None:
    """The folder is not reported as deleted."""

    class Stuck(JobFiles):
        """Removes nothing, as on a file system that became read-only."""

        def remove(self, job_id: str) -> bool:
            """Do nothing."""
            del job_id
            return False

    job_id = kept.job(LONG_AGO)
    report = prune(kept.store.retention, Stuck(kept.data_dir / "runs"), DAY, recommendations=False, dry_run=False)
    assert (report.folders, report.folders_left) == ((), (str(kept.folder(job_id)),))
