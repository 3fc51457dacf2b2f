"""Tests of the folders that jobs may read, from the submission to the run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.client import ApiError, Client
from batchwright.client.documents.states import State
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright_service.application.rules.policy import Policy
from batchwright_service.bootstrap import app_of, build
from batchwright_service.errors import DataPathNotAllowedError
from batchwright_service.settings import Settings
from tests.support.factories import CPU, gpt_spec, recommendation, resnet_spec
from tests.support.service.running import StartService, listening

TEXT = "some text of the inside, which is long enough " * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that jobs may read, with links to one beside it that they may not."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "deep", root / "classes", outside):
        folder.mkdir(parents=True)
    for name in ("s.txt", "s.jsonl", "s.png"):
        (outside / name).write_text(TEXT)
    (root / "a.txt").write_text(TEXT)
    (root / "deep" / "link").symlink_to(outside)
    (root / "deep" / "s.txt").symlink_to(outside / "s.txt")
    (root / "classes" / "cat").symlink_to(outside)
    return root


def text(pattern: str, kind: str = "text") -> WorkloadSpec:
    """A language model over files."""
    return gpt_spec(data={"kind": kind, "paths": [pattern]})


REFUSED: dict[str, Callable[[Path], WorkloadSpec]] = {
    "a wildcard in a link's name": lambda root: text(f"{root}/deep/lin?/s.txt"),
    "any link": lambda root: text(f"{root}/*/*/s.txt"),
    "a linked file": lambda root: text(f"{root}/deep/*.txt"),
    "any depth": lambda root: text(f"{root}/**/*.jsonl", "records"),
    "a class's folder": lambda root: resnet_spec(data={"kind": "images", "path": f"{root}/classes"}),
}


@pytest.mark.parametrize("route", REFUSED)
def test_links_out_are_refused_at_submission(root: Path, route: str) -> None:
    """Links are found through wildcards, and in the folders of classes."""
    with pytest.raises(DataPathNotAllowedError, match=r"spec\.data\.paths?: .* outside the folders that jobs may read"):
        Policy([], [str(root)]).check_data(REFUSED[route](root))
    Policy([], [str(root)]).check_data(text(f"{root}/*.txt"))


def test_a_link_out_is_named_by_the_api(start_service: StartService, root: Path) -> None:
    """A problem document that says which path, and whose setting it is."""
    with start_service(data_roots=str(root)).client as client, pytest.raises(ApiError) as caught:
        client.jobs.submit(recommendation(text(f"{root}/deep/lin?/s.txt")))
    assert (caught.value.status, caught.value.code) == (403, "data-path-not-allowed")
    assert "/deep/link" in caught.value.problem.detail
    assert "BATCHWRIGHT_DATA_ROOTS" in caught.value.problem.detail


@pytest.fixture
def client(root: Path, tmp_path: Path) -> Iterator[Client]:
    """A client of a service whose jobs are the processes of a real worker."""
    settings = Settings(data_dir=tmp_path / "data", node_name="host", data_roots=(str(root),), poll_seconds=0.05)
    system = build(settings, devices=[CPU], versions={"torch": "2.8"})
    with listening(app_of(system, settings)) as url, Client(url) as opened:
        yield opened


def submitted(client: Client, spec: WorkloadSpec, **training: Any) -> str:
    """The id of a job that was taken."""
    return client.jobs.submit(recommendation(spec, 8, 4), training=TrainingRequest(**training)).id


@pytest.mark.usefixtures("forked")
def test_a_job_records_its_evaluations(client: Client, root: Path) -> None:
    """In the events of its updates, in its newest progress, and in its result."""
    spec = text(f"{root}/a.txt").model_copy(
        update={"evaluation": gpt_spec(evaluation={"count": 20, "every": 2, "metrics": ["accuracy"]}).evaluation}
    )
    job = client.jobs.wait(submitted(client, spec, updates=4))
    assert job.state is State.SUCCEEDED
    reported = [event.progress for event in client.jobs.events(job.id) if event.progress is not None]
    made = [report for update in reported if isinstance(update, TrainingProgress) for report in update.evaluations]
    assert [report.update for report in made] == [0, 2, 4]
    assert [report.samples for report in made] == [20, 20, 20]
    assert isinstance(job.progress, TrainingProgress)
    assert job.progress.evaluations == (made[-1],)
    assert job.result is not None
    assert job.result.evaluation is not None
    assert (job.result.evaluation.first, job.result.evaluation.last) == (made[0], made[-1])


@pytest.mark.usefixtures("forked")
def test_a_link_that_comes_after_the_submission_ends_the_job(client: Client, root: Path) -> None:
    """The worker hands its own folders to the run, which judges what it opens; a job without such a link is made."""
    first = submitted(client, text(f"{root}/*.txt"), updates=100_000)
    second = submitted(client, text(f"{root}/*.txt"), updates=1)
    third = submitted(client, text(f"{root}/a.txt"), updates=1)
    (root / "b.txt").symlink_to(root.parent / "outside" / "s.txt")
    client.jobs.cancel(first)
    refused = client.jobs.wait(second)
    assert refused.state is State.FAILED
    assert refused.problem is not None
    assert "b.txt" in refused.problem.detail
    assert "BATCHWRIGHT_DATA_ROOTS" in refused.problem.detail
    assert client.jobs.wait(third).state is State.SUCCEEDED
