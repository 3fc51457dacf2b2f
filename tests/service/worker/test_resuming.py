"""A job that failed or was cancelled goes on from its checkpoint, and is refused where it cannot."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.client import Client
from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Job, JobSubmission
from batchwright.client.errors import ConflictError, NotAllowedError, NotFoundError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright_service.application.rules.policy import Policy
from batchwright_service.bootstrap import System, build
from batchwright_service.domain.callers import KEYLESS
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import (
    NotFoundError as NothingError,
    NotResumableError,
    QuotaExceededError,
    TargetNotAllowedError,
)
from batchwright_service.settings import Settings
from batchwright_service.store.models import Ending, Quota
from batchwright_service.store.store import Store
from batchwright_service.worker.executors.local import LocalExecutor
from tests.support.factories import CPU, recommendation, tuning_request
from tests.support.service.running import Running, StartService, running
from tests.support.service.scripted import ScriptedRunner, Trainer, new_work, progress
from tests.support.service.stores import claimed, set_work

PATIENCE_SECONDS = 240.0


# --- the store ---


def test_a_resumed_job_waits_again_without_its_end(store: Store) -> None:
    """Updates, events and device time are kept; problem, result and end are cleared."""
    store.submissions.add(new_work("job_1", WorkKind.JOB))
    lease = claimed(store).lease
    store.evidence.record_progress(lease, [progress(1)])
    problem = Problem(type="urn:x", title="t", detail="d", code="training-failed")
    result = TrainingResult(outcome=RunOutcome.FAILED, message="m", updates=1)
    store.leases.finish(lease, Ending(State.FAILED, problem=problem, result=result))
    resumed = store.submissions.resume("job_1")
    assert (resumed.state, resumed.ended_at, resumed.problem, resumed.result) == (State.QUEUED, None, None, None)
    assert resumed.progress == progress(1)
    assert [event.state for event in store.evidence.events("job_1") if event.state] == [
        "QUEUED",
        "RUNNING",
        "FAILED",
        "QUEUED",
    ]
    assert store.statistics.totals(None).failures == ()
    again = claimed(store)
    assert (again.item.id, again.item.attempts, again.lost_leases) == ("job_1", 2, 0)
    store.leases.finish(again.lease, Ending(State.SUCCEEDED, result=result))
    assert store.work.get("job_1").state is State.SUCCEEDED


def test_only_jobs_that_failed_or_were_cancelled_are_resumed(store: Store) -> None:
    """Anything else stays as it is; of two who resume at once, one is refused."""
    store.submissions.add(new_work("tun_1"))
    store.submissions.cancel("tun_1")
    store.submissions.add(new_work("job_1", WorkKind.JOB))
    for work_id, state in (("tun_1", State.CANCELLED), ("job_1", State.QUEUED)):
        with pytest.raises(NotResumableError, match=state):
            store.submissions.resume(work_id)
        assert store.work.get(work_id).state is state
    store.submissions.cancel("job_1")
    store.submissions.resume("job_1")
    with pytest.raises(NotResumableError, match="QUEUED"):
        store.submissions.resume("job_1")
    with pytest.raises(NothingError):
        store.submissions.resume("job_2")


def test_a_resumed_job_takes_a_place_in_its_keys_quota(store: Store) -> None:
    """As if it were submitted; it stays as it ended when there is none."""
    for work_id in ("job_1", "job_2"):
        store.submissions.add(new_work(work_id, WorkKind.JOB, key_id="a" * 16))
    store.submissions.cancel("job_1")
    with pytest.raises(QuotaExceededError):
        store.submissions.resume("job_1", Quota(queued=1))
    assert store.work.get("job_1").state is State.CANCELLED
    assert store.submissions.resume("job_1", Quota(queued=2)).state is State.QUEUED


# --- the service ---


def cancelled(service: Running, client: Client) -> Job:
    """A job that was cancelled at update 3, and wrote a checkpoint before."""
    service.trainer.hold_at = 3
    tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
    assert tuning.recommendation is not None
    job = client.jobs.submit(tuning.recommendation.id, TrainingRequest(updates=5))
    assert service.trainer.holding.wait(PATIENCE_SECONDS)
    folder = service.settings.runs_dir / job.id / "checkpoints" / "update-00000002"
    folder.mkdir(parents=True)
    (folder / "state.pt").touch()
    client.jobs.cancel(job.id)
    return client.jobs.wait(job.id)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Job]]:
    """A service with a cancelled job that could go on."""
    with running(tmp_path_factory.mktemp("ended"), ScriptedRunner(37), Trainer()) as service, service.client as client:
        yield service, cancelled(service, client)


def test_a_cancelled_job_goes_on_and_is_followed_to_its_second_end(start_service: StartService) -> None:
    """Its stream tells of both ends, each event once; a summary counts the second alone."""
    service = start_service()
    with service.client as client:
        job = cancelled(service, client)
        assert job.state is State.CANCELLED
        service.trainer.hold_at = None
        assert client.jobs.resume(job.id).state in {State.QUEUED, State.RUNNING, State.SUCCEEDED}
        events = list(client.jobs.events(job.id))
        assert client.jobs.wait(job.id).state is State.SUCCEEDED
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        states = [event.state for event in events if event.state]
        assert states == ["QUEUED", "RUNNING", "CANCELLING", "CANCELLED", "QUEUED", "RUNNING", "SUCCEEDED"]
        assert [event.progress.update for event in events if event.progress] == [1, 2, 3, 4, 5]
        assert (client.summary().jobs[State.SUCCEEDED], client.summary().jobs[State.CANCELLED]) == (1, 0)
        with pytest.raises(ConflictError, match="SUCCEEDED"):
            client.jobs.resume(job.id)


def test_without_a_checkpoint_it_is_refused(ended: tuple[Running, Job]) -> None:
    """409 says what to do instead; the job stays as it ended. So does one that never began."""
    service, job = ended
    folder = service.settings.runs_dir / job.id / "checkpoints"
    aside = folder.rename(folder.with_name("aside"))
    never = service.system.store.submissions.add(
        new_work("job_" + "1" * 32, WorkKind.JOB, payload=service.system.store.work.get(job.id).payload)
    )
    service.system.store.submissions.cancel(never.id)
    with service.client as client:
        for job_id in (job.id, never.id):
            with pytest.raises(ConflictError, match=r"not-resumable.*no checkpoint.*submit it again"):
                client.jobs.resume(job_id)
        assert client.jobs.get(job.id).state is State.CANCELLED
    aside.rename(folder)


def test_where_its_folder_is_not_it_is_refused(ended: tuple[Running, Job]) -> None:
    """Another host has it, or a worker that is gone."""
    service, job = ended
    url = service.settings.url
    with service.client as client:
        set_work(url, job.id, slot="elsewhere/cpu")
        with pytest.raises(ConflictError, match="not-on-this-host"):
            client.jobs.resume(job.id)
        (service.settings.runs_dir / job.id / ".slot").write_text("host/cuda:0")
        set_work(url, job.id, slot="host/cuda:0")
        with pytest.raises(ConflictError, match=r"not-resumable.*host/cuda:0, which no worker serves"):
            client.jobs.resume(job.id)
        (service.settings.runs_dir / job.id / ".slot").write_text("host/cpu")
        set_work(url, job.id, slot="host/cpu")


def test_an_unknown_job_is_not_found(ended: tuple[Running, Job]) -> None:
    """Nor is a tuning a job."""
    with ended[0].client as client:
        for job_id in ("job_" + "0" * 32, "x"):
            with pytest.raises(NotFoundError):
                client.jobs.resume(job_id)


def test_only_its_owner_or_an_admin_resumes(start_service: StartService) -> None:
    """No other key of the same scopes can resume a job of another key, or a job without a key."""
    service = start_service()
    with service.client as client:
        job = cancelled(service, client)
    new, key = make_key("other", (Scope.JOBS_READ, Scope.JOBS_RUN))
    service.system.store.keys.add(new)
    with Client(service.url, api_key=key) as other, pytest.raises(NotAllowedError, match="not-owner"):
        other.jobs.resume(job.id)


def test_what_the_operator_allows_no_more_is_not_resumed(
    ended: tuple[Running, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is asked again: it may be another one by now."""

    def refuse(_policy: Policy, _spec: object) -> None:
        raise TargetNotAllowedError("not any more")

    monkeypatch.setattr(Policy, "check_model", refuse)
    service, job = ended
    with service.client as client, pytest.raises(NotAllowedError, match="not any more"):
        client.jobs.resume(job.id)


# --- a real run ---


@pytest.mark.usefixtures("forked")
def test_a_real_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Cancelled after some updates and resumed, it makes the rest: no update is recorded twice, none is left out."""
    settings = Settings(data_dir=tmp_path, node_name="host", poll_seconds=0.05)
    runner = ScriptedRunner(8)
    system = build(settings, lambda device: LocalExecutor(device, runner), [CPU], {"torch": "2.8"})
    jobs = system.context.jobs
    system.start()
    try:
        training = TrainingRequest(updates=5_000, checkpoint_every=2)
        job_id = jobs.submit(JobSubmission(recommendation=recommendation(), training=training), KEYLESS).work_id
        cancelled_after(system, job_id, 6)
        newest = jobs.checkpoints(job_id).items[-1].update
        assert newest >= 4
        jobs.resume(job_id, KEYLESS)
        cancelled_after(system, job_id, newest + 6)
        updates = [
            event.progress.update for event in system.store.evidence.events(job_id, limit=10_000) if event.progress
        ]
        assert updates == list(range(1, updates[-1] + 1))
        assert updates[-1] >= newest + 6
        assert jobs.checkpoints(job_id).items[-1].update > newest
    finally:
        system.stop()


def cancelled_after(system: System, job_id: str, update: int) -> None:
    """Cancel a job when it has reported an update, and wait for its end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (item := system.store.work.get(job_id)).state.terminal:
        assert time.monotonic() < deadline
        if item.state is State.RUNNING and item.progress is not None and item.progress.update >= update:
            system.context.jobs.cancel(job_id, KEYLESS)
        threading.Event().wait(0.02)
    assert item.state is State.CANCELLED, item.problem
