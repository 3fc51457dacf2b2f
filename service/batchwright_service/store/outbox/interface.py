"""The interfaces of webhooks and of their outbox, and the values that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchwright.client.documents.webhooks import Delivery, DeliveryState, Webhook, WebhookSubmission
from batchwright_service.domain.callers import COMMAND_LINE, Actor


@dataclass(frozen=True)
class DueDelivery:
    """A message that is due and that nobody has leased."""

    id: str
    webhook_id: str
    url: str


Choose = Callable[[Sequence[DueDelivery]], Sequence[str]]
"""Returns the ids of the messages to lease now."""


@dataclass(frozen=True)
class LeasedDelivery:
    """A message whose next attempt is the caller's, until the lease ends."""

    id: str
    webhook_id: str
    url: str
    secrets: tuple[str, ...]
    """The valid secrets, the newest first."""
    body: str
    attempt: int
    """Number of this attempt, from 1; the fencing token of the lease."""
    now: float
    """Time of the lease by the database's clock, in seconds since 1970."""
    age_seconds: float
    """Time since the event."""


@dataclass(frozen=True)
class Backlog:
    """The messages that are not delivered."""

    pending: int
    dead: int
    oldest_due_seconds: float
    """Time for which the oldest due message waits; 0 when none is due."""


class WebhookStore(ABC):
    """Webhooks and their secrets. Each change has its entry in the audit log."""

    @abstractmethod
    def add(
        self, webhook_id: str, submission: WebhookSubmission, secret: str, most: int, actor: Actor = COMMAND_LINE
    ) -> Webhook:
        """Store a webhook.

        Raises:
            ConflictError: when its id is taken, or when there are ``most`` webhooks already.
        """

    @abstractmethod
    def list(self) -> list[Webhook]:
        """Return all webhooks with the counts of their deliveries, oldest first."""

    @abstractmethod
    def rotate(self, webhook_id: str, secret: str, overlap_seconds: float, actor: Actor = COMMAND_LINE) -> Webhook:
        """Replace the secret; the old one signs too for ``overlap_seconds``, an older one no more.

        Raises:
            NotFoundError: when there is none with this id.
        """

    @abstractmethod
    def delete(self, webhook_id: str, actor: Actor = COMMAND_LINE) -> None:
        """Delete a webhook with its deliveries.

        Raises:
            NotFoundError: when there is none with this id.
        """


class DeliveryStore(ABC):
    """The outbox of messages."""

    @abstractmethod
    def add_test(self, webhook_id: str, message_id: str) -> Delivery:
        """Add a test message, which reports no event.

        Raises:
            NotFoundError: when there is no such webhook.
        """

    @abstractmethod
    def lease(self, lease_seconds: float, choose: Choose) -> list[LeasedDelivery]:
        """Lease the due messages that ``choose`` returns. A message is due again when its lease ends.

        ``choose`` gets the ``MOST_TOGETHER`` messages of each webhook that have been due longest, the longest first.
        """

    @abstractmethod
    def delivered(self, leased: LeasedDelivery, status: int) -> bool:
        """Record that the receiver has the message; False when the lease has gone to another deliverer."""

    @abstractmethod
    def failed(self, leased: LeasedDelivery, error: str, status: int | None, retry_seconds: float | None) -> bool:
        """Record a failed attempt; the next is due in ``retry_seconds``, or the message is dead if that is None.

        False when the lease has gone to another deliverer.
        """

    @abstractmethod
    def newest(
        self, webhook_id: str, limit: int, before: str | None = None, state: DeliveryState | None = None
    ) -> Sequence[Delivery]:
        """Return at most ``limit`` deliveries to a webhook, newest first, older than the id ``before``.

        Raises:
            NotFoundError: when there is no such webhook.
        """

    @abstractmethod
    def send_again(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Make a delivery due now, with all of its attempts before it; one that is pending becomes due now.

        Raises:
            NotFoundError: when there is no such delivery to this webhook.
        """

    @abstractmethod
    def backlog(self) -> Backlog:
        """Count the messages that are not delivered."""

    @abstractmethod
    def prune(self, delivered_seconds: float, dead_seconds: float) -> int:
        """Delete delivered and dead messages of these ages, and those of deleted webhooks; return their number."""


MOST_TOGETHER = 2
"""Messages to one webhook that are sent at once, so that a slow receiver delays no other."""
