"""The documents the API takes and returns. Pure data.

The SDK imports this module, so it knows neither FastAPI nor SQLAlchemy nor torch.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, Self, TypeVar

from pydantic import Field, model_validator

from service.domain.exports import ExportRequest
from service.domain.problems import Problem
from service.domain.states import State
from tuner.exports.base import Export
from tuner.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.gpus import Gpu
from tuner.schemas.plans import PlanSummary
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import DeviceId, Objective, TrainingRequest, TuningRequest
from tuner.schemas.results import ProbeResult
from tuner.schemas.training import TrainingProgress, TrainingResult
from tuner.schemas.workload import Precision

RowT = TypeVar("RowT", bound=Document)

# --- what is sent ----------------------------------------------------------------------------------------------------


Priority = Annotated[int, Field(ge=-100, le=100)]
"""Work of a higher priority is taken first. Above 0 only with the scope `admin`."""


class TuningSubmission(TuningRequest):
    """A tuning to make, unless a stored recommendation serves it."""

    fresh: bool = False
    """Probe again, even when a recommendation with the same fingerprint is stored."""
    priority: Priority = 0
    """Work of a higher priority is taken first, older work before newer of the same; above 0 needs the scope `admin`.
    The recommendation does not depend on it."""

    def to_request(self) -> TuningRequest:
        """The request without what only concerns its submission."""
        return TuningRequest.model_validate(self.model_dump(exclude={"fresh", "priority"}))


class JobSubmission(Document):
    """A training run to make from a recommendation: a stored one, or one sent along."""

    recommendation_id: str | None = None
    """Identifier of a stored recommendation."""
    recommendation: Recommendation | None = None
    """The recommendation itself, for one made elsewhere."""
    training: TrainingRequest = TrainingRequest()
    """How long to train, and how often to write checkpoints."""
    dry_run: bool = False
    """Only return the configured job; run nothing."""
    export: ExportRequest | None = None
    """Dry runs: also return the recommendation in the words of this framework or launcher."""
    priority: Priority = 0
    """Work of a higher priority is taken first, older work before newer of the same; above 0 needs the scope
    `admin`."""

    @model_validator(mode="after")
    def _names_one_recommendation(self) -> Self:
        if (self.recommendation_id is None) == (self.recommendation is None):
            raise ValueError("give exactly one of `recommendation_id` and `recommendation`")
        return self

    @model_validator(mode="after")
    def _exports_in_a_dry_run(self) -> Self:
        if self.export is not None and not self.dry_run:
            raise ValueError("`export` is for dry runs: say `dry_run` too, or leave it out")
        return self


class JobRequest(Document):
    """A job as it is queued: with its recommendation, so that nothing else is needed to run it."""

    recommendation: Recommendation
    """What the run is made from."""
    training: TrainingRequest
    """How long to train, and how often to write checkpoints."""


# --- what comes back -------------------------------------------------------------------------------------------------


class WorkSummary(Document):
    """A tuning or job in a list: what a table shows, and nothing large."""

    id: str
    """Identifier; later ones sort after earlier ones."""
    state: State
    """Where it stands."""
    device: DeviceId
    """The device it needs."""
    model: str
    """Short name of the model: the architecture, `model_type` or target."""
    effective_batch_size: PositiveInt
    """Samples per optimizer update over all ranks."""
    priority: int = 0
    """Work of a higher priority is taken first."""
    attempts: NonNegativeInt
    """How often a worker started on it: more than one after a restart or a takeover."""
    created_at: datetime
    """When it was submitted (UTC)."""
    started_at: datetime | None = None
    """When a worker first started on it."""
    ended_at: datetime | None = None
    """When it ended."""
    updated_at: datetime
    """When anything about it last changed."""
    key_id: str | None = None
    """The API key that submitted it; none on a service without keys."""
    events: NonNegativeInt
    """Events so far: the id of the newest."""


class QueuePosition(Document):
    """The position in the queue of a tuning or job that waits, as it was at most a second ago."""

    position: PositiveInt
    """Its position in the order of its device, from 1."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """Expected seconds until it is taken, to the second, as in `GET /v1/queue`; none where that is unknown."""


class TuningSummary(WorkSummary):
    """A tuning in a list."""

    fingerprint: str
    """SHA-256 of everything the recommendation depends on."""
    probes: NonNegativeInt
    """Probes recorded so far."""
    recommendation_id: str | None = None
    """Identifier of the recommendation, once there is one."""
    warm_start_from: str | None = None
    """Identifier of the stored recommendation that warm-starts this tuning: one for the same request, under other
    versions or another limit. One probe may confirm it."""


class Tuning(TuningSummary):
    """The search for the largest micro-batch for one request."""

    slot: str | None = None
    """The slot (host and device) that runs it, or ran it last."""
    queue: QueuePosition | None = None
    """Its position in the queue, while it waits; none in the response to its submission, and until it is known."""
    request: TuningRequest
    """The request."""
    problem: Problem | None = None
    """Why it failed."""
    recommendation: Recommendation | None = None
    """The result, once there is one. `feasible: false` is a result too."""


class JobSummary(WorkSummary):
    """A job in a list."""

    recommendation_id: str
    """The recommendation it was made from."""


class Job(JobSummary):
    """A training run made from a recommendation."""

    slot: str | None = None
    """The slot (host and device) that runs it, or ran it last."""
    queue: QueuePosition | None = None
    """Its position in the queue, while it waits; none in the response to its submission, and until it is known."""
    training: TrainingRequest
    """The requested run."""
    recommendation: Recommendation
    """What it was made from."""
    directory: str | None = None
    """The run's folder, with its log, progress, checkpoints and weights, where that is on the host that answers; none
    before the run begins, and for one that is, or was last, on another host: see `slot`."""
    progress: TrainingProgress | None = None
    """The newest finished update."""
    result: TrainingResult | None = None
    """How the run ended."""
    problem: Problem | None = None
    """Why it failed."""


class JobFile(Document):
    """A file that a job needs."""

    path: str
    """Where it goes, relative to the run's folder."""
    content: str
    """What it holds."""


class ConfiguredJob(Document):
    """Everything it takes to run a job: what a dry run returns."""

    command: tuple[str, ...]
    """The arguments of the process, program first: `python` is one that has Batchwright installed, and paths are
    relative to the folder of the run, which is the caller's to choose."""
    environment: dict[str, str]
    """Variables to add to the environment; the probes ran with them."""
    working_directory: str
    """Where the command runs: `.` is the folder of the run, with `files` in it."""
    files: tuple[JobFile, ...]
    """Files to write into the run's folder first."""
    device: DeviceId
    """The device it needs."""
    recommendation_id: str
    """What it is made from."""
    export: Export | None = None
    """The recommendation in the words of another framework or launcher, where that was requested."""


class Checkpoint(Document):
    """A checkpoint of a job."""

    update: NonNegativeInt
    """The optimizer update after which it was written."""
    size_bytes: NonNegativeInt
    """Size of its files."""
    modified_at: datetime
    """When it was written (UTC)."""


class CheckpointList(Document):
    """The checkpoints that a job has kept."""

    items: tuple[Checkpoint, ...]
    """From the oldest to the newest."""


class RecordedProbe(Document):
    """A probe of a tuning."""

    ordinal: PositiveInt
    """Its position in the order of probes, from 1."""
    recorded_at: datetime
    """When its result was stored."""
    result: ProbeResult
    """What it found."""


class ProbeList(Document):
    """The evidence of a tuning so far."""

    items: tuple[RecordedProbe, ...]
    """Every probe, in the order they ran."""


class EventKind(StrEnum):
    """What an event reports."""

    STATE = "state"
    """The state changed."""
    PROBE = "probe"
    """A probe ended."""
    PROGRESS = "progress"
    """An optimizer update was made."""


class Event(Document):
    """Something that happened to a tuning or job. Exactly the field named by `kind` is set."""

    id: PositiveInt
    """Its number within the tuning or job, from 1 without gaps: what `Last-Event-ID` takes."""
    at: datetime
    """When it was recorded."""
    kind: EventKind
    """What it reports."""
    state: State | None = None
    """The new state."""
    probe: RecordedProbe | None = None
    """The probe that ended."""
    progress: TrainingProgress | None = None
    """The update that was made."""


class RecommendationSummary(Document):
    """A recommendation in a list."""

    plan: PlanSummary | None = None
    """What to train with; none when nothing fits."""
    largest_micro_batch_size: PositiveInt | None = None
    """The micro-batch that was proven to fit: no micro-batch of the plan is above it."""
    id: str
    """Identifier."""
    tuning_id: str
    """The tuning that found it."""
    created_at: datetime
    """When it was made (UTC)."""
    fingerprint: str
    """SHA-256 of everything the recommendation depends on."""
    model: str
    """Short name of the model."""
    device: DeviceId
    """The device that was probed."""
    device_name: str
    """The product's name."""
    feasible: bool
    """Whether any micro-batch fits."""
    effective_batch_size: PositiveInt
    """Samples per update that were requested."""
    precision: Precision
    """Of the spec."""
    objective: Objective
    """What the tuning was for."""


class Page(Document, Generic[RowT]):
    """A part of a list, newest first."""

    items: tuple[RowT, ...]
    """The rows."""
    next_cursor: str | None = None
    """Pass it as `cursor` to get the next part; none on the last."""


class TuningPage(Page[TuningSummary]):
    """A part of the list of tunings, newest first."""


class JobPage(Page[JobSummary]):
    """A part of the list of jobs, newest first."""


class RecommendationPage(Page[RecommendationSummary]):
    """A part of the list of recommendations, newest first."""


class GpuList(Document):
    """The catalogue of GPUs that estimates know."""

    items: tuple[Gpu, ...]
    """By generation."""
