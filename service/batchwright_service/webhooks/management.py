"""Use cases of webhooks, for administrators."""

import logging
import re

from batchwright.client.documents.webhooks import (
    Delivery,
    DeliveryPage,
    DeliveryState,
    SecretRotation,
    WebhookList,
    WebhookSubmission,
    WebhookWithSecret,
)
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.errors import InvalidCursorError
from batchwright_service.store.outbox.deliveries import DeliveryStore
from batchwright_service.store.outbox.registrations import WebhookStore
from batchwright_service.webhooks.receivers import AllowedReceivers
from batchwright_service.webhooks.signatures import new_secret

_log = logging.getLogger(__name__)
_MOST_WEBHOOKS = 50
"""The end of each tuning and job writes a row for each webhook."""
_CURSOR = re.compile(r"m([0-9a-f]{32})")


class WebhookCases:
    """Use cases of webhooks. Safe to share between threads."""

    def __init__(self, webhooks: WebhookStore, deliveries: DeliveryStore, receivers: AllowedReceivers) -> None:
        self._webhooks = webhooks
        self._deliveries = deliveries
        self._receivers = receivers
        self._identifiers = IdentifierSource()

    def create(self, submission: WebhookSubmission, caller: Caller) -> WebhookWithSecret:
        """Register a webhook. Only the returned document has its secret.

        Raises:
            InvalidInputError: when the operator does not allow the host.
            ConflictError: when there are as many webhooks as there may be.
        """
        self._receivers.checked_url(submission.url)
        secret = new_secret()
        created = self._webhooks.add(self._identifiers.new("whk"), submission, secret, _MOST_WEBHOOKS, caller)
        _log.info("webhook %s was registered by key %s", created.id, caller.key_id or "(none)")
        return WebhookWithSecret(**dict(created), secret=secret)

    def list(self) -> WebhookList:
        """Return all webhooks, and the hosts that the operator allows."""
        return WebhookList(items=tuple(self._webhooks.list()), hosts=self._receivers.hosts)

    def rotate(self, webhook_id: str, rotation: SecretRotation, caller: Caller) -> WebhookWithSecret:
        """Replace the secret of a webhook, as ``WebhookStore.rotate``. Only the returned document has the new one."""
        secret = new_secret()
        rotated = self._webhooks.rotate(webhook_id, secret, rotation.overlap_seconds, caller)
        return WebhookWithSecret(**dict(rotated), secret=secret)

    def delete(self, webhook_id: str, caller: Caller) -> None:
        """Delete a webhook with its deliveries, as ``WebhookStore.delete``."""
        self._webhooks.delete(webhook_id, caller)

    def test(self, webhook_id: str) -> Delivery:
        """Send a test message, which reports no event, as ``DeliveryStore.add_test``."""
        return self._deliveries.add_test(webhook_id, self._identifiers.new("msg"))

    def deliveries(
        self, webhook_id: str, limit: int, cursor: str | None = None, state: DeliveryState | None = None
    ) -> DeliveryPage:
        """Return a page of the deliveries to a webhook, newest first.

        Raises:
            NotFoundError: when there is no such webhook.
            InvalidCursorError: when the cursor is not of this list.
        """
        found = None if cursor is None else _CURSOR.fullmatch(cursor)
        if cursor is not None and found is None:
            raise InvalidCursorError("cursor: pass `next_cursor` of the previous page, unchanged")
        before = None if found is None else f"msg_{found[1]}"
        rows = self._deliveries.newest(webhook_id, limit + 1, before, state)
        following = "m" + rows[limit - 1].id.removeprefix("msg_") if len(rows) > limit else None
        return DeliveryPage(items=tuple(rows[:limit]), next_cursor=following)

    def send_again(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send a message again, with the same identifier, as ``DeliveryStore.send_again``."""
        return self._deliveries.send_again(webhook_id, delivery_id)
