"""What callers can do, each as one method: the rules are here, not in the routes and not in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic_core import PydanticSerializationError

from service import views
from service.domain import (
    ConfiguredJob,
    Event,
    Job,
    JobFile,
    JobPage,
    JobRequest,
    JobSubmission,
    ProbeList,
    RecommendationPage,
    Tuning,
    TuningPage,
    TuningSubmission,
)
from service.earlier import find_earlier
from service.errors import (
    InfeasibleRecommendationError,
    InvalidInputError,
    NotFoundError,
    NotOwnerError,
    NotReadyError,
    UnknownDeviceError,
)
from service.fleet import DeviceList, DeviceStatus, Health, ServedDevice
from service.identifiers import IdentifierSource
from service.keys import Caller
from service.placement import (
    check_every_process_has_samples,
    check_goes_with_one_device,
    check_same_device,
    processes_of,
)
from service.policy import Policy
from service.states import WorkKind
from service.store.base import NewWork, RecommendationFilter, SeenDevice, Store, WorkItem, WorkRow
from tuner.documents import Document
from tuner.requests import TuningRequest
from tuner.results import Recommendation
from tuner.specs import PythonModel, TransformersModel, WorkloadSpec
from tuner.training.rank_processes import training_command
from tuner.training.runs import RunPaths
from tuner.tuning import Tuning as TuningCourse


class UseCases:
    """Everything the API offers. Safe to share between threads.

    Args:
        store: where work is kept.
        policy: what the operator allows.
        runs_dir: where jobs run.
        lease_seconds: a worker not heard of for longer is not counted as serving its device.
        notify: called after work was queued or cancelled, so that workers of this process look at once.
    """

    def __init__(
        self, store: Store, policy: Policy, runs_dir: Path, lease_seconds: float, notify: Callable[[], None]
    ) -> None:
        self._store = store
        self._policy = policy
        self._runs_dir = runs_dir
        self._lease_seconds = lease_seconds
        self._notify = notify
        self._identifiers = IdentifierSource()

    # --- tunings ---

    def submit_tuning(self, submission: TuningSubmission, caller: Caller) -> tuple[Tuning, bool]:
        """Queue a tuning, or find the one with the same fingerprint that has its answer; and whether it was queued.

        An answer to the same question under other versions or another limit is never served: it leads the new tuning.

        Raises:
            TargetNotAllowedError: when its code is not allow-listed.
            UnknownDeviceError: when no live worker serves its device.
            QuotaExceededError: when the caller's key has used its quota.
        """
        self._policy.check_model(submission.spec)
        seen = self._serving(submission.device)
        request = submission.to_request().model_copy(update={"device": seen.served.device.id})
        course = _course(request, seen.served)
        work = replace(self._new_tuning(course), key_id=caller.key_id)
        if not submission.fresh:
            if (known := self._store.tuning_with_answer(work.fingerprint)) is not None:
                return self._answer_from(self.tuning(known), work, request, seen.served), False
            work = replace(work, earlier_recommendation_id=find_earlier(self._store, course))
        item = self._store.add(work, self._policy.quota)
        self._notify()
        return views.tuning(item, None), True

    def tuning(self, tuning_id: str) -> Tuning:
        """One tuning.

        Raises:
            NotFoundError: when there is none with this id.
        """
        return self._tuning_view(self._get(tuning_id, WorkKind.TUNING))

    def tunings(self, limit: int, cursor: str | None) -> TuningPage:
        """A page of tunings, newest first.

        Raises:
            InvalidCursorError: when the cursor is not one of ours.
        """
        rows, next_cursor = self._page(WorkKind.TUNING, limit, cursor)
        return TuningPage(items=tuple(views.tuning_summary(row) for row in rows), next_cursor=next_cursor)

    def probes(self, tuning_id: str) -> ProbeList:
        """The evidence of a tuning so far.

        Raises:
            NotFoundError: when there is no such tuning.
        """
        self._get(tuning_id, WorkKind.TUNING)
        return ProbeList(items=tuple(self._store.probes(tuning_id)))

    def cancel_tuning(self, tuning_id: str, caller: Caller) -> Tuning:
        """Cancel a tuning; one that has ended stays as it is.

        Raises:
            NotFoundError: when there is no such tuning.
            NotOwnerError: when another key made it.
        """
        return self._tuning_view(self._cancel(tuning_id, WorkKind.TUNING, caller))

    # --- recommendations ---

    def recommendation(self, recommendation_id: str) -> Recommendation:
        """One recommendation.

        Raises:
            NotFoundError: when there is none with this id.
        """
        if not views.is_identifier(recommendation_id):
            raise NotFoundError(f"there is no recommendation {recommendation_id!r}")
        return self._store.recommendation(recommendation_id)

    def recommendations(self, wanted: RecommendationFilter, limit: int, cursor: str | None) -> RecommendationPage:
        """A page of recommendations, newest first.

        Raises:
            InvalidCursorError: when the cursor is not one of ours.
        """
        rows = self._store.recommendations(wanted, limit + 1, views.decode_cursor(cursor))
        following = views.encode_cursor(rows[limit - 1].id) if len(rows) > limit else None
        return RecommendationPage(items=tuple(rows[:limit]), next_cursor=following)

    # --- jobs ---

    def submit_job(self, submission: JobSubmission, caller: Caller) -> Job:
        """Queue a training run.

        Raises:
            RequestError: when the recommendation cannot be trained here; the message says why.
            QuotaExceededError: when the caller's key has used its quota.
        """
        recommendation = self._trainable(submission)
        check_goes_with_one_device(recommendation, submission.training)
        request = JobRequest(recommendation=recommendation, training=submission.training)
        work = NewWork(
            id=self._identifiers.new("job"),
            kind=WorkKind.JOB,
            device=recommendation.device.id,
            model=model_name(recommendation.request.spec),
            effective_batch_size=recommendation.effective_batch_size.requested,
            fingerprint=recommendation.fingerprint,
            payload=_payload(request),
            recommendation_id=recommendation.id,
            key_id=caller.key_id,
        )
        item = self._store.add(work, self._policy.quota)
        self._notify()
        return views.job(item, self._runs_dir)

    def configure_job(self, submission: JobSubmission) -> ConfiguredJob:
        """What ``submit_job`` would run; runs nothing, so that it may need more devices than a job holds.

        Raises:
            RequestError: as ``submit_job``.
        """
        recommendation = self._trainable(submission)
        directory = self._runs_dir / self._identifiers.new("job")
        paths = RunPaths(directory)
        return ConfiguredJob(
            command=tuple(training_command(directory, processes_of(recommendation, submission.training))),
            environment=recommendation.environment,
            working_directory=str(directory),
            files=(
                _file(paths.recommendation, directory, recommendation),
                _file(paths.request, directory, submission.training),
            ),
            device=recommendation.device.id,
            recommendation_id=recommendation.id,
        )

    def job(self, job_id: str) -> Job:
        """One job.

        Raises:
            NotFoundError: when there is none with this id.
        """
        return views.job(self._get(job_id, WorkKind.JOB), self._runs_dir)

    def jobs(self, limit: int, cursor: str | None) -> JobPage:
        """A page of jobs, newest first.

        Raises:
            InvalidCursorError: when the cursor is not one of ours.
        """
        rows, next_cursor = self._page(WorkKind.JOB, limit, cursor)
        return JobPage(items=tuple(views.job_summary(row) for row in rows), next_cursor=next_cursor)

    def cancel_job(self, job_id: str, caller: Caller) -> Job:
        """Cancel a job; one that has ended stays as it is.

        Raises:
            NotFoundError: when there is no such job.
            NotOwnerError: when another key made it.
        """
        return views.job(self._cancel(job_id, WorkKind.JOB, caller), self._runs_dir)

    # --- following ---

    def events(self, work_id: str, after: int) -> list[Event]:
        """Events of a tuning or job that are newer than the id ``after``; a bounded number of them."""
        return self._store.events(work_id, after)

    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """The id of the newest event of each tuning or job."""
        return self._store.event_counts(work_ids)

    # --- devices and health ---

    def devices(self) -> DeviceList:
        """The devices, and who holds each."""
        return DeviceList(items=tuple(self._device_status(seen) for seen in self._store.devices()))

    def readiness(self) -> Health:
        """Whether work can be queued and will be run.

        Raises:
            StoreUnavailableError: when the database cannot be written.
            NotReadyError: when no worker, or not every worker, has been heard of lately.
        """
        self._store.check()
        devices = self._store.devices()
        silent = [seen.served.place for seen in devices if not self._is_alive(seen)]
        if silent or not devices:
            raise NotReadyError("no worker is heard of" + (f" on {', '.join(silent)}" if silent else ""))
        return Health(status="ok", checks={"store": "written", "workers": f"{len(devices)} heard of"})

    # --- helpers ---

    def _get(self, work_id: str, kind: WorkKind) -> WorkItem:
        item = self._store.get(work_id) if views.is_identifier(work_id) else None
        if item is None or item.kind is not kind:
            raise NotFoundError(f"there is no {kind} {work_id!r}")
        return item

    def _cancel(self, work_id: str, kind: WorkKind, caller: Caller) -> WorkItem:
        if not caller.may_change(self._get(work_id, kind).key_id):
            raise NotOwnerError(
                f"{work_id!r} was not made with this API key: only that key, or one with the scope admin, can cancel it"
            )
        item = self._store.cancel(work_id)
        self._notify()
        return item

    def _new_tuning(self, course: TuningCourse) -> NewWork:
        return NewWork(
            id=self._identifiers.new("tun"),
            kind=WorkKind.TUNING,
            device=course.device.id,
            model=model_name(course.request.spec),
            effective_batch_size=course.request.effective_batch_size,
            fingerprint=course.fingerprint,
            question=course.question,
            payload=_payload(course.request),
        )

    def _answer_from(self, known: Tuning, work: NewWork, request: TuningRequest, served: ServedDevice) -> Tuning:
        """A stored answer to a question with the same fingerprint.

        The fingerprint leaves out what does not change memory: the data, the learning rate, which of two like GPUs. A
        job is made from its recommendation's own request, so another such part makes a recommendation of its own,
        resting on the same evidence.
        """
        answer = known.recommendation
        if answer is None or _same_question(answer.request, request):
            return known
        changes = {"id": self._identifiers.new("rec"), "request": request, "device": served.device}
        item = self._store.add_answered(work, answer.model_copy(update=changes))
        return self._tuning_view(item)

    def _tuning_view(self, item: WorkItem) -> Tuning:
        answer = item.recommendation_id
        return views.tuning(item, self._store.recommendation(answer) if answer else None)

    def _page(self, kind: WorkKind, limit: int, cursor: str | None) -> tuple[list[WorkRow], str | None]:
        rows = self._store.newest(kind, limit + 1, views.decode_cursor(cursor))
        following = views.encode_cursor(rows[limit - 1].id) if len(rows) > limit else None
        return rows[:limit], following

    def _is_alive(self, seen: SeenDevice) -> bool:
        return seen.age_seconds <= self._lease_seconds

    def _device_status(self, seen: SeenDevice) -> DeviceStatus:
        return DeviceStatus(
            **dict(seen.served),
            alive=self._is_alive(seen),
            heartbeat_age_seconds=seen.age_seconds,
            held_by=seen.held_by,
            queued=seen.queued,
        )

    def _serving(self, device: str | None) -> SeenDevice:
        """The live worker for a device; for none, that of the first GPU, else of the CPU."""
        alive = [seen for seen in self._store.devices() if self._is_alive(seen)]
        alive.sort(key=lambda seen: (seen.served.device.kind == "cpu", len(seen.served.device.id), seen.served.place))
        found = next((seen for seen in alive if device in {None, seen.served.device.id}), None)
        if found is None:
            served = ", ".join(sorted({seen.served.device.id for seen in alive})) or "none"
            raise UnknownDeviceError(f"device {device or '(any)'} is not served here; served: {served}")
        return found

    def _trainable(self, submission: JobSubmission) -> Recommendation:
        recommendation = submission.recommendation
        if recommendation is None:
            recommendation = self.recommendation(str(submission.recommendation_id))
        here = self._serving(recommendation.device.id).served
        if submission.recommendation is not None:
            self._policy.check_foreign(recommendation, here.environment)
        if not recommendation.feasible:
            raise InfeasibleRecommendationError(
                f"recommendation {recommendation.id!r} says that nothing fits: {recommendation.infeasible_reason}"
            )
        self._check_job_spec(recommendation.request.spec)
        check_same_device(recommendation.device, here.device)
        check_every_process_has_samples(recommendation, submission.training)
        return recommendation

    def _check_job_spec(self, spec: WorkloadSpec) -> None:
        if spec.data is None:
            raise InvalidInputError(
                "the recommendation's spec has no `data`: say what to train on, for example "
                "`data: {kind: text, paths: [...]}` or `data: {kind: synthetic}`, and tune again"
            )
        self._policy.check_model(spec)
        self._policy.check_data(spec)


def _course(request: TuningRequest, served: ServedDevice) -> TuningCourse:
    return TuningCourse(request, served.device, environment=served.environment, versions=served.versions)


def model_name(spec: WorkloadSpec) -> str:
    """A short name for lists: the architecture, the `model_type` or the target."""
    model = spec.model
    if isinstance(model, TransformersModel):
        return str(model.config["model_type"])
    return model.target if isinstance(model, PythonModel) else model.architecture.name


def _payload(document: Document) -> str:
    """A request as it is stored.

    Raises:
        InvalidInputError: when a free part of it holds text that cannot be written (half a surrogate pair).
    """
    try:
        return document.model_dump_json()
    except PydanticSerializationError as error:
        raise InvalidInputError(f"the request cannot be stored: {error}") from None


def _same_question(one: TuningRequest, other: TuningRequest) -> bool:
    """Whether two requests ask the same, how long a probe may take aside."""
    aside = {"probe_timeout_seconds"}
    return one.model_dump(exclude=aside) == other.model_dump(exclude=aside)


def _file(path: Path, directory: Path, document: Document) -> JobFile:
    return JobFile(path=str(path.relative_to(directory)), content=document.model_dump_json(indent=2))
