"""The documents that the API takes and returns. Pure data."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator
from typing_extensions import override

from batchwright.client.documents.exports import ExportRequest
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.staleness import Staleness
from batchwright.client.documents.states import State, WorkOutcome
from batchwright.exports.base import Export
from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from batchwright.schemas.gpus import Gpu
from batchwright.schemas.plans import PlanSummary
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import DeviceId, Named, Objective, TrainingRequest, TuningRequest
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.training import RunCourse, RunProgress, TrainingResult
from batchwright.schemas.workload import Precision

RowT = TypeVar("RowT", bound=Document)

# --- requests --------------------------------------------------------------------------------------------------------


Priority = Annotated[int, Field(ge=-100, le=100)]
"""Work of a higher priority is taken first. A priority above 0 needs the scope `admin`."""


class TuningSubmission(TuningRequest, Named):
    """A tuning to run, unless a stored recommendation has the same fingerprint."""

    fresh: bool = False
    """Probe again, even when a recommendation with the same fingerprint is stored."""
    priority: Priority = 0
    """Work of a higher priority is taken first, and older work first within a priority. A priority above 0 needs the
    scope `admin`. The recommendation does not depend on the priority."""

    def to_request(self) -> TuningRequest:
        """Return the request without the fields that only concern its submission."""
        return TuningRequest.model_validate(self.model_dump(exclude={"fresh", "priority", *Named.model_fields}))


class PriorityChange(Document):
    """Another priority of a tuning or job that waits."""

    priority: Priority
    """Work of a higher priority is taken first. A priority above 0 needs the scope `admin`."""


class JobSubmission(Named):
    """A training run from a recommendation, which is either stored or part of the request.

    A job without any name, project or label has those of its recommendation.
    """

    recommendation_id: str | None = None
    """Identifier of a stored recommendation."""
    recommendation: Recommendation | None = None
    """A recommendation that another service, or `batchwright tune`, made."""
    training: TrainingRequest = TrainingRequest()
    """Length of the training, and interval of checkpoints. A command takes `updates`, if anything."""
    dry_run: bool = False
    """Return the configured job, and run nothing."""
    export: ExportRequest | None = None
    """Dry runs: also return the recommendation as an export to this framework or launcher."""
    priority: Priority = 0
    """Work of a higher priority is taken first, and older work first within a priority. A priority above 0 needs the
    scope `admin`."""

    @model_validator(mode="after")
    def _names_one_recommendation(self) -> Self:
        if (self.recommendation_id is None) == (self.recommendation is None):
            raise ValueError("give exactly one of `recommendation_id` and `recommendation`")
        return self

    @model_validator(mode="after")
    def _exports_in_a_dry_run(self) -> Self:
        if self.export is not None and not self.dry_run:
            raise ValueError("`export` is for dry runs: set `dry_run` too, or leave `export` out")
        return self


class JobRequest(Document):
    """A job as it is queued, with its recommendation, so that the job can be run from this document alone."""

    recommendation: Recommendation
    """The recommendation that the run follows."""
    training: TrainingRequest
    """Length of the training, and interval of checkpoints."""


# --- responses -------------------------------------------------------------------------------------------------------


class RecommendedFigures(Document):
    """The figures of a recommendation that lists show; none while there is no recommendation."""

    feasible: bool | None = None
    """True when there is a plan. A tuning that succeeded with `false` found that there is none: see `outcome`."""
    plan: PlanSummary | None = None
    """The plan to train with; none when nothing fits."""
    largest_micro_batch_size: PositiveInt | None = None
    """Largest micro-batch size that was proven to fit; no micro-batch of the plan is larger."""
    peak_bytes: NonNegativeInt | None = None
    """Most memory held at the recommended size, as in the recommendation's headroom."""
    limit_bytes: PositiveInt | None = None
    """Memory limit of the run, before the margin."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples of a rank over the time of an update of the plan, as in the recommendation's alternatives."""
    speedup: NonNegativeFloat | None = None
    """Samples per second over those of the request's baseline; none without one, and where not both are known."""
    speed_source: Literal["measured", "estimated"] | None = None
    """Source of the speedup, as in the recommendation's gain."""


class WorkSummary(Named, RecommendedFigures):
    """A tuning or job in a list, without its large fields.

    The figures are those of its recommendation; none where that is not stored on this service.
    """

    id: str
    """Identifier; sorts by the time of submission."""
    state: State
    """Its state."""
    outcome: WorkOutcome | None = None
    """How it ended; none while it has not ended. A tuning whose state is `SUCCEEDED` may have found that nothing fits:
    then this is `infeasible`."""
    device: DeviceId | None = None
    """The device that it needs; none where it needs hardware, wherever that is."""
    hardware: str | None = None
    """The hardware that it needs, in words: as requested, and the kind of device that it is bound to from its first
    probe on. None where it needs a device."""
    slot: str | None = None
    """The slot (host and device) that runs it, or ran it last."""
    model: str
    """Short name of the model: the architecture, `model_type`, target or registered command."""
    effective_batch_size: PositiveInt
    """Samples per optimizer update over all ranks."""
    priority: int = 0
    """Work of a higher priority is taken first."""
    attempts: NonNegativeInt
    """Number of claims by workers: above one after a restart or a takeover."""
    created_at: datetime
    """Time of the submission (UTC)."""
    started_at: datetime | None = None
    """Time of the first claim by a worker."""
    ended_at: datetime | None = None
    """Time of its end."""
    updated_at: datetime
    """Time of the last change."""
    key_id: str | None = None
    """The API key that submitted it; none on a service without keys."""
    owner: str | None = None
    """Name of that key."""
    events: NonNegativeInt
    """Number of events so far, which is the id of the newest."""
    problem: Problem | None = None
    """Cause of the failure."""

    @property
    @override
    def headline(self) -> str:
        """The identifier, with the name, and the state."""
        return f"{self.id}{f' ({self.name})' if self.name else ''}: {self.state.lower()}"


class QueuePosition(Document):
    """The position of a waiting tuning or job in the queue, at most a second old."""

    position: PositiveInt
    """Position in the queue of its device or hardware, from 1."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """Expected seconds until a worker takes it, rounded, as in `GET /v1/queue`; none where unknown."""
    unserved: str | None = None
    """Reason why it waits however long the queue is, such as `no worker has H100-80GB`; none where a worker serves
    it."""


class TuningSummary(WorkSummary):
    """A tuning in a list."""

    fingerprint: str | None = None
    """SHA-256 of everything that the recommendation depends on; none before the first probe of a tuning that needs
    hardware, whose kind is not known until then."""
    probes: NonNegativeInt
    """Number of recorded probes so far."""
    recommendation_id: str | None = None
    """Identifier of the recommendation, when the tuning has ended with one."""
    warm_start_from: str | None = None
    """Identifier of the stored recommendation that warm-starts this tuning: one for the same request, under other
    versions or another limit. One probe may confirm it."""


class Tuning(TuningSummary):
    """The search for the largest micro-batch for one request."""

    queue: QueuePosition | None = None
    """Its position in the queue while it waits; none in the response to its submission, and while not yet computed."""
    activity: str | None = None
    """What it does now, such as `running two updates at micro-batch 86`; none unless it runs. A change of it is no
    event, and ends no long poll."""
    request: TuningRequest
    """The request."""
    recommendation: Recommendation | None = None
    """The result, when the tuning has ended. `feasible: false` is a result too."""


class JobSummary(WorkSummary):
    """A job in a list."""

    recommendation_id: str
    """Identifier of the recommendation that the job follows."""
    course: RunCourse | None = None
    """Progress, pace, remaining time and losses of the training; none before its first update."""


class Job(JobSummary):
    """A training run that follows a recommendation."""

    queue: QueuePosition | None = None
    """Its position in the queue while it waits; none in the response to its submission, and while not yet computed."""
    training: TrainingRequest
    """The requested run."""
    recommendation: Recommendation
    """The recommendation that the job follows."""
    directory: str | None = None
    """Folder of the run, with its log, progress, checkpoints and weights. None before the run begins, and if the
    folder is on another host: see `slot`."""
    progress: RunProgress | None = None
    """The newest finished update; of a command, the updates since its last start."""
    result: TrainingResult | None = None
    """Result of the run."""


class JobFile(Document):
    """A file that a job needs."""

    path: str
    """Path relative to the folder of the run."""
    content: str
    """Content of the file."""


class ConfiguredJob(Document):
    """Everything that is needed to run a job: the result of a dry run."""

    command: tuple[str, ...]
    """Arguments of the process, program first. `python` stands for an interpreter that has Batchwright installed. Paths
    are relative to the folder of the run, which the caller chooses."""
    environment: dict[str, str]
    """Environment variables to set; the probes ran with them."""
    working_directory: str
    """Folder in which the command runs: `.` is the folder of the run, which contains `files`."""
    files: tuple[JobFile, ...]
    """Files to write into the folder of the run first."""
    device: DeviceId
    """The device that it needs."""
    recommendation_id: str
    """Identifier of the recommendation that the job follows."""
    export: Export | None = None
    """The requested export of the recommendation to a framework or launcher."""


class Checkpoint(Document):
    """A checkpoint of a job."""

    update: NonNegativeInt
    """Optimizer update after which the checkpoint was written."""
    size_bytes: NonNegativeInt
    """Size of its files."""
    modified_at: datetime
    """Time at which it was written (UTC)."""


class CheckpointList(Document):
    """The kept checkpoints of a job."""

    items: tuple[Checkpoint, ...]
    """Checkpoints, oldest first."""


class RecordedProbe(Document):
    """A probe of a tuning."""

    ordinal: PositiveInt
    """Position in the order of the probes, from 1."""
    recorded_at: datetime
    """Time at which its result was stored (UTC)."""
    result: ProbeResult
    """Its result."""


class ProbeList(Document):
    """The evidence of a tuning so far."""

    items: tuple[RecordedProbe, ...]
    """All probes, in the order in which they ran."""


class EventKind(StrEnum):
    """The kind of an event."""

    STATE = "state"
    """The state changed."""
    PROBE = "probe"
    """A probe ended."""
    PROGRESS = "progress"
    """The training made an optimizer update, or a command one or more."""


class Event(Document):
    """An event of a tuning or job. Of `state`, `probe` and `progress`, the field named by `kind` is set."""

    id: PositiveInt
    """Number of the event within the tuning or job, from 1 without gaps; a valid `Last-Event-ID`."""
    at: datetime
    """Time at which it was recorded (UTC)."""
    kind: EventKind
    """Kind of the event."""
    state: State | None = None
    """The new state."""
    probe: RecordedProbe | None = None
    """The probe that ended."""
    progress: RunProgress | None = None
    """The optimizer update; of a command, the updates since its last start."""


class RecommendationSummary(Named, RecommendedFigures, Staleness):
    """A recommendation in a list."""

    id: str
    """Identifier."""
    tuning_id: str
    """Identifier of the tuning that found it."""
    key_id: str | None = None
    """The API key that submitted the tuning; none on a service without keys."""
    owner: str | None = None
    """Name of that key."""
    created_at: datetime
    """Time of creation (UTC)."""
    fingerprint: str
    """SHA-256 of everything that the recommendation depends on."""
    model: str
    """Short name of the model."""
    device: DeviceId
    """The device that was probed."""
    device_name: str
    """Product name of the device."""
    feasible: bool
    """True when there is a plan."""
    effective_batch_size: PositiveInt
    """Requested samples per optimizer update."""
    precision: Precision | None = None
    """Precision of the spec; none for a command, which has its own."""
    objective: Objective
    """Objective of the tuning."""
    uses: PositiveInt | None = None
    """Number of recommendations that match and have the same fingerprint, one for each tuning that this result served;
    none unless the request has `distinct=true`."""


class Page(Document, Generic[RowT]):
    """A page of a list, newest first."""

    items: tuple[RowT, ...]
    """Rows of the page."""
    next_cursor: str | None = None
    """Value of `cursor` for the next page; none on the last page."""


class CountedPage(Page[RowT], Generic[RowT]):
    """A page of a list whose rows can be counted."""

    total: NonNegativeInt | None = None
    """Number of rows on all pages, counted up to 10,000; none unless the request has `total=true`."""


class TuningPage(CountedPage[TuningSummary]):
    """A page of the list of tunings, newest first."""


class JobPage(CountedPage[JobSummary]):
    """A page of the list of jobs, newest first."""


class RecommendationPage(CountedPage[RecommendationSummary]):
    """A page of the list of recommendations, newest first."""


class GpuList(Document):
    """The catalogue of GPUs that estimates support."""

    items: tuple[Gpu, ...]
    """GPUs, by generation."""
