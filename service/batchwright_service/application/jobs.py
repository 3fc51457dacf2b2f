"""Use cases of jobs, which are training runs that follow recommendations."""

from pathlib import Path

from batchwright.client.documents.problems import FieldFault
from batchwright.client.documents.states import RESUMABLE_STATES, WorkKind
from batchwright.client.documents.work import (
    CheckpointList,
    ConfiguredJob,
    Job,
    JobFile,
    JobRequest,
    JobSubmission,
    QueuePosition,
)
from batchwright.client.documents.workers import ServedDevice
from batchwright.hardware.matching import kind_of
from batchwright.schemas.base import Document
from batchwright.schemas.command import UPDATES, CommandSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.launching.rank_processes import training_command
from batchwright.training.launching.run_directory import RunPaths
from batchwright_service.application import views
from batchwright_service.application.exports import exported
from batchwright_service.application.rules.device_checks import (
    check_cards_of_ranks,
    check_every_process_has_samples,
    check_packages,
    check_process_count,
    check_same_device,
    hardware_of_job,
    probe_environment,
    ranks_per_node,
)
from batchwright_service.application.rules.hardware_matches import workers_with
from batchwright_service.application.rules.idempotency import SubmissionResponse
from batchwright_service.application.work import WorkCases, model_name, payload
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.errors import (
    ConflictError,
    InfeasibleRecommendationError,
    InvalidInputError,
    NotOnThisHostError,
    NotResumableError,
    UnknownDeviceError,
    UnsupportedJobError,
)
from batchwright_service.observability.tracing import current_trace_parent
from batchwright_service.store.models import Idempotency, NewWork, WorkItem

_HERE = Path()
_PYTHON = "python"
"""A configured job has no paths of this host: it runs wherever its caller writes its files."""
_TRAIN = (_PYTHON, "-m", "batchwright", "train")
"""Runs the command of a recommendation, as a worker does."""


class JobCases(WorkCases[JobSubmission, Job]):
    """Use cases of jobs. Safe to share between threads."""

    kind = WorkKind.JOB

    def configure(self, submission: JobSubmission) -> ConfiguredJob:
        """Return the job that ``submit`` would run; it may need more devices than a job can hold.

        Raises:
            RequestError: as ``submit``.
            ExportError: when the export does not support the recommendation or the options.
        """
        recommendation, _ = self._trainable(submission)
        paths = RunPaths(_HERE)
        files = [_file(paths.recommendation, recommendation)]
        if recommendation.request.command is not None:
            command = [*_TRAIN, str(paths.recommendation), "--output-dir", str(_HERE)]
            if UPDATES in recommendation.request.command.model.placeholders:
                command += ["--updates", str(submission.training.updates)]
        else:
            training = submission.training
            command = training_command(_HERE, ranks_per_node(recommendation, training), _PYTHON, hosts=training.nodes)
            files.append(_file(paths.request, submission.training))
        return ConfiguredJob(
            command=tuple(command),
            environment=recommendation.environment,
            working_directory=str(_HERE),
            files=tuple(files),
            device=recommendation.device.id,
            recommendation_id=recommendation.id,
            export=exported(recommendation, submission.export) if submission.export else None,
        )

    def resume(self, job_id: str, caller: Caller) -> Job:
        """Queue a failed or cancelled job again, to go on from its newest checkpoint in the same folder.

        A command is started anew there: it may find checkpoints of its own in its output folder.

        Raises:
            NotFoundError: when no job has this id.
            NotOwnerError: when another key submitted it.
            NotResumableError: when it is in another state, has no checkpoint, or no worker serves its slot.
            NotOnThisHostError: when its folder is on another host.
            RequestError: when the operator no longer allows it, or its slot has another device now.
            QuotaExceededError: when its key has used its quota.
        """
        item = self._item_to_change(job_id, caller, "resume")
        self._check_resumable(item)
        return self._view(self._store.submissions.resume(job_id, self._context.policy.quota, caller))

    def log(self, job_id: str, max_bytes: int) -> bytes:
        """Return the end of the log of the run; empty while the run has not begun.

        Raises:
            NotFoundError: when no job has this id.
            NotOnThisHostError: when it ran on another host.
        """
        self._check_on_this_host(job_id)
        return self._context.job_files.log_tail(job_id, max_bytes)

    def checkpoints(self, job_id: str) -> CheckpointList:
        """Return the kept checkpoints of the run; raises as ``log``."""
        self._check_on_this_host(job_id)
        return CheckpointList(items=self._context.job_files.checkpoints(job_id))

    # --- helpers ---

    def _submit(self, submission: JobSubmission, caller: Caller, idempotency: Idempotency | None) -> SubmissionResponse:
        recommendation, need = self._trainable(submission)
        if recommendation.request.command is None:
            check_process_count(recommendation, submission.training)
            check_packages(recommendation, submission.training, self._possible_devices(recommendation, need))
        if (nodes := submission.training.nodes) > 1 and not self._store.fleet.reports():
            raise UnsupportedJobError(  # the workers of a host take no others
                f"the run takes {nodes} hosts (`training.nodes`), and this service has no cluster: serve with `--ray` "
                "or `--slurm`, start the command of a dry run (`dry_run: true`) on each host, or use one host"
            )
        request = JobRequest(recommendation=recommendation, training=submission.training)
        work = NewWork(
            id=self._context.identifiers.new("job"),
            kind=WorkKind.JOB,
            device=recommendation.device.id if need is None else ANY_DEVICE,
            model=model_name(recommendation.request.spec),
            effective_batch_size=recommendation.request.effective_batch_size,
            fingerprint=recommendation.fingerprint,
            payload=payload(request),
            recommendation_id=recommendation.id,
            priority=submission.priority,
            key_id=caller.key_id,
            address=caller.address,
            names=submission.names if submission.is_named else recommendation.names,
            hardware=kind_of(recommendation.device) if need is None else need.lane,
            trace_parent=current_trace_parent(),
        )
        return self._queue(work, idempotency)

    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> Job:
        return views.job(
            item, self._context.job_files.directory(item.id) if self._is_on_this_host(item) else None, queue
        )

    def _remove_files(self, work_id: str) -> None:
        """Remove the folder of a job, where that is on this host."""
        if not self._context.job_files.remove(work_id):
            raise ConflictError(
                f"the folder of {work_id} cannot be removed: the operator must check "
                f"{self._context.job_files.directory(work_id)}; then delete it again"
            )

    def _check_resumable(self, item: WorkItem) -> None:
        if item.state not in RESUMABLE_STATES:
            raise NotResumableError(f"{item.id} is {item.state}: only a job that is FAILED or CANCELLED can be resumed")
        self._check_on_this_host(item.id)
        recommendation = JobRequest.from_stored(item.payload).recommendation
        if recommendation.request.command is None and not self._context.job_files.checkpoints(item.id):
            raise NotResumableError(
                f"{item.id} has no checkpoint to resume from: submit it again, with `training.checkpoint_every`"
            )
        devices = self._store.devices.list()
        announced = next((device for device in devices if device.served.slot == item.slot), None)
        if announced is None or not self._context.is_alive(announced):
            raise NotResumableError(f"{item.id} ran on {item.slot}, which no worker serves now")
        check_same_device(recommendation.device, announced.served.device)
        self._allowed(recommendation)

    def _check_on_this_host(self, job_id: str) -> None:
        """Refuse a started job whose folder is not on this host, or is of an earlier attempt."""
        item = self._item(job_id)
        if item.slot is not None and not self._is_on_this_host(item):
            raise NotOnThisHostError(
                f"the files of {job_id} are on {item.slot}, which this server cannot read: share one "
                "BATCHWRIGHT_RUNS_DIR between hosts to see them here"
            )

    def _is_on_this_host(self, item: WorkItem) -> bool:
        """Return whether the folder of a job's last attempt is on this host."""
        files = self._context.job_files
        return item.slot is not None and files.has_directory(item.id) and files.slot(item.id) in {None, item.slot}

    def _trainable(self, submission: JobSubmission) -> tuple[Recommendation, HardwareNeed | None]:
        """Return the recommendation of a submission, and the hardware that it needs if any device of it will do."""
        recommendation = submission.recommendation
        if recommendation is None:
            recommendation_id = str(submission.recommendation_id)
            views.check_identifier(recommendation_id, "recommendation")
            recommendation = self._store.recommendations.get(recommendation_id)
        need = self._need(recommendation, submission.training)
        served = (
            self._context.live_device(recommendation.device.id).served
            if need is None
            else next((worker.served for worker in workers_with(need, self._context.live_workers())), None)
        )
        if submission.recommendation is not None:
            environment = {} if served is None else probe_environment(recommendation.request, served)
            self._context.policy.check_foreign(recommendation, environment)
        if not recommendation.feasible:
            raise InfeasibleRecommendationError(
                f"recommendation {recommendation.id!r} says that nothing fits: {recommendation.infeasible_reason}"
            )
        recommendation = self._allowed(recommendation)
        if served is not None:
            check_same_device(recommendation.device, served.device)
        if recommendation.request.command is not None:
            _check_training(recommendation.request.command, submission.training)
        check_every_process_has_samples(recommendation, submission.training)
        return recommendation, need

    def _need(self, recommendation: Recommendation, training: TrainingRequest) -> HardwareNeed | None:
        """Return the hardware of a job; none where it needs the device that was probed.

        A command of several ranks holds a card for each, unless its host serves that device alone and leaves the other
        cards to the command.
        """
        need, command = hardware_of_job(recommendation, training), recommendation.request.command
        if need is None or command is None or recommendation.request.hardware is not None:
            return need
        try:
            served = self._context.live_device(recommendation.device.id).served
            check_cards_of_ranks(command, served, self._store.devices.list())
        except UnknownDeviceError:
            return need
        return None

    def _possible_devices(self, recommendation: Recommendation, need: HardwareNeed | None) -> list[ServedDevice]:
        """Return the devices with live workers that may run a job."""
        alive = self._context.live_workers()
        if need is not None:
            return [worker.served for worker in workers_with(need, alive)]
        probed = (recommendation.device.id, kind_of(recommendation.device))
        return [worker.served for worker in alive if (worker.served.device.id, worker.served.hardware) == probed]

    def _allowed(self, recommendation: Recommendation) -> Recommendation:
        """Return the recommendation as a worker runs it: of a command, with the parts that the operator has registered.

        Raises:
            RequestError: when this service does not run the workload.
        """
        spec = recommendation.request.spec
        if not isinstance(spec, CommandSpec):
            self._check_spec(spec)
            return recommendation
        with self._context.policy.files.slot():
            resolved = self._context.commands.resolved(spec)
        request = recommendation.request.model_copy(update={"spec": resolved})
        return recommendation.model_copy(update={"request": request})

    def _check_spec(self, spec: WorkloadSpec) -> None:
        if spec.data is None:
            raise InvalidInputError(
                "the recommendation's spec has no `data`: name the training data, for example "
                "`data: {kind: text, paths: [...]}` or `data: {kind: synthetic}`, and tune again"
            )
        self._context.policy.check_model(spec)
        self._context.policy.check_data(spec)


def _check_training(command: CommandSpec, training: TrainingRequest) -> None:
    """Refuse settings that a command does not get. Defaults are taken: programs send them for what they leave out."""
    taken = {"updates"} if UPDATES in command.model.placeholders else set()
    faults = [
        FieldFault(
            field=f"training.{name}",
            message=f"is not given to the command `{command.model.name}`: leave it out",
            value=repr(value),
        )
        for name, value in training
        if name not in taken and value != TrainingRequest.model_fields[name].default
    ]
    if faults:
        raise InvalidInputError.listing(faults)


def _file(path: Path, document: Document) -> JobFile:
    return JobFile(path=str(path), content=document.model_dump_json(indent=2))
