"""Webhooks: receivers that are notified when tunings and jobs end, and the messages that they get. Pure data."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Page
from batchwright.schemas.base import Document, NonNegativeInt
from batchwright.schemas.field_errors import described_pattern
from batchwright.schemas.requests import PRINTED, Project

_LONGEST_URL = 2000
_LONGEST_NAME = 100
LONGEST_ERROR = 500
"""Characters of a stored error."""
DEFAULT_OVERLAP_SECONDS = 86_400.0
"""Time for which a replaced secret signs beside the new one, unless the request says otherwise."""
MOST_OVERLAP_SECONDS = 7 * 86_400.0
_ADDRESS = described_pattern(r"^https?://[!-~]+$", "must be an http or https URL of printable ASCII characters")


class WebhookEvent(StrEnum):
    """A kind of message."""

    TUNING_SUCCEEDED = "tuning.succeeded"
    """A tuning ended with a plan."""
    TUNING_INFEASIBLE = "tuning.infeasible"
    """A tuning ended without a plan: not even one sample fits, or its command makes other updates than requested."""
    TUNING_FAILED = "tuning.failed"
    TUNING_CANCELLED = "tuning.cancelled"
    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    TEST = "webhook.test"
    """An administrator asked for a message, to try the receiver."""


ENDINGS = tuple(event for event in WebhookEvent if event is not WebhookEvent.TEST)
"""The events that a webhook can choose among."""


class DeliveryState(StrEnum):
    """A state of a delivery."""

    PENDING = "pending"
    """It waits for its first or its next attempt."""
    DELIVERED = "delivered"
    """The receiver answered with a status of 200 to 299."""
    DEAD = "dead"
    """The last attempt failed. It is sent again on request only."""


Events = Annotated[
    tuple[WebhookEvent, ...], Field(max_length=len(ENDINGS), examples=[["tuning.succeeded", "job.failed"]])
]


class WebhookSubmission(Document):
    """A webhook to register."""

    url: Annotated[
        str, Field(max_length=_LONGEST_URL, pattern=_ADDRESS, examples=["https://hooks.example.org/tunings"])
    ]
    """Address that gets the messages, by POST. `BATCHWRIGHT_WEBHOOK_HOSTS` must list its host."""
    name: Annotated[str, Field(max_length=_LONGEST_NAME, pattern=PRINTED)] = ""
    """Name that tells it from others in lists."""
    events: Events = ()
    """Events to tell; all of tunings and jobs when empty."""
    project: Project | None = None
    """Tell only of tunings and jobs of this project."""


class Webhook(Document):
    """A registered webhook, without its secret."""

    id: str
    """Identifier."""
    url: str
    """Address that gets the messages."""
    name: str
    """Name."""
    events: tuple[WebhookEvent, ...]
    """Events that are sent; all of tunings and jobs when empty."""
    project: str | None
    """Project whose work is reported. None for all work."""
    created_at: datetime
    """Time of registration (UTC)."""
    previous_secret_until: datetime | None = None
    """Time until which the replaced secret signs beside the new one."""
    pending: NonNegativeInt = 0
    """Deliveries that wait for an attempt."""
    dead: NonNegativeInt = 0
    """Deliveries whose last attempt failed."""


class WebhookList(Document):
    """The registered webhooks."""

    items: tuple[Webhook, ...]
    """All webhooks, oldest first."""
    hosts: tuple[str, ...] = ()
    """Hosts that the operator allows, as `BATCHWRIGHT_WEBHOOK_HOSTS` lists them."""


class WebhookWithSecret(Webhook):
    """A webhook with its new secret. Only this response shows the secret."""

    secret: Annotated[str, Field(examples=["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])] = Field(repr=False)
    """Secret that signs the messages, in the format of Standard Webhooks."""


class SecretRotation(Document):
    """A new secret for a webhook."""

    overlap_seconds: Annotated[float, Field(ge=0.0, le=MOST_OVERLAP_SECONDS)] = DEFAULT_OVERLAP_SECONDS
    """Seconds for which the replaced secret signs beside the new one, so that receivers can change over."""


class Delivery(Document):
    """A message to one webhook, and how its delivery goes."""

    id: str
    """Identifier of the message, which every attempt sends as `webhook-id`: receivers ignore what they have had."""
    event: WebhookEvent
    """Event that is reported."""
    work_id: str | None
    """Tuning or job; none of a test."""
    state: DeliveryState
    """State."""
    attempts: NonNegativeInt
    """Attempts that were begun."""
    created_at: datetime
    """Time of the event (UTC)."""
    next_attempt_at: datetime | None
    """Time of the next attempt; none when no further one is due. During an attempt, the end of its lease."""
    ended_at: datetime | None
    """Time at which it was delivered, or at which the last attempt failed."""
    last_status: Annotated[int, Field(ge=100, le=999)] | None
    """HTTP status of the last attempt that was answered, which may be one that HTTP does not define."""
    last_error: str | None
    """Reason for which the last attempt failed."""


class DeliveryPage(Page[Delivery]):
    """A page of the deliveries to a webhook, newest first."""


class EndedWork(Document):
    """The tuning or job that a message tells of. The API has the rest under its `id`."""

    id: str
    """Identifier of the tuning or job."""
    kind: WorkKind
    """Kind of work."""
    state: State
    """State in which it ended."""
    name: str | None
    """Name."""
    project: str | None
    """Project."""
    labels: dict[str, str]
    """Labels."""
    model: str
    """Short name of the model."""
    effective_batch_size: int
    """Samples per optimizer update."""
    recommendation_id: str | None
    """Recommendation: of a tuning its result, of a job the one it was made from."""
    feasible: bool | None = None
    """False when not even one sample fits; none without a recommendation."""
    micro_batch_size: int | None = None
    """Samples per device and pass of the recommended plan."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per device and update of the recommended plan."""
    problem_code: str | None = None
    """Code of the problem with which it failed."""


class WebhookMessage(Document):
    """The body of a message, as JSON."""

    type: WebhookEvent
    """Event."""
    timestamp: datetime
    """Time of the event (UTC)."""
    data: EndedWork | None
    """The tuning or job; none of a test."""
