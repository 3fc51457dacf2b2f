"""The calls of webhooks, for callers with the scope `admin`."""

from collections.abc import AsyncGenerator, Sequence

from batchwright.client.core import PAGE_SIZE, Resource
from batchwright.client.documents.webhooks import (
    DEFAULT_OVERLAP_SECONDS,
    Delivery,
    DeliveryPage,
    DeliveryState,
    SecretRotation,
    Webhook,
    WebhookEvent,
    WebhookList,
    WebhookSubmission,
    WebhookWithSecret,
)
from batchwright.client.http_messages import Call, path_of

_WEBHOOKS = "/v1/webhooks"


class AsyncWebhooks(Resource):
    """Webhooks: receivers that are notified when tunings and jobs end. For callers with the scope `admin`."""

    async def create(
        self, url: str, *, name: str = "", events: Sequence[WebhookEvent | str] = (), project: str | None = None
    ) -> WebhookWithSecret:
        """Register a webhook. Its secret is ``secret`` of the result and is never shown again. The call is not retried.

        Args:
            url: address that gets the messages; the operator of the service must allow its host.
            name: name that tells it from others.
            events: events to tell; all when empty.
            project: tell only of the work of this project.

        Raises:
            ApiError: when the service refuses, for example the host.
            ConnectionFailedError: when no response came; a webhook whose secret nobody has may have been registered.
        """
        wanted = tuple(WebhookEvent(event) for event in events)
        submission = WebhookSubmission(url=url, name=name, events=wanted, project=project)
        return await self._core.call(WebhookWithSecret, Call("POST", _WEBHOOKS, body=submission, repeatable=False))

    async def list(self) -> tuple[Webhook, ...]:
        """List all webhooks, oldest first, with the counts of what is not delivered."""
        return (await self._core.call(WebhookList, Call("GET", _WEBHOOKS))).items

    async def rotate(self, webhook_id: str, overlap_seconds: float = DEFAULT_OVERLAP_SECONDS) -> WebhookWithSecret:
        """Replace the secret; the old one signs too for ``overlap_seconds``. The call is not retried.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        call = Call(
            "POST",
            path_of(_WEBHOOKS, webhook_id, "rotate"),
            body=SecretRotation(overlap_seconds=overlap_seconds),
            repeatable=False,
        )
        return await self._core.call(WebhookWithSecret, call)

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook with its messages, those that are not delivered included.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        await self._core.delete(path_of(_WEBHOOKS, webhook_id))

    async def test(self, webhook_id: str) -> Delivery:
        """Send a message of the type `webhook.test`; ``deliveries`` shows its result. The call is not retried.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        return await self._core.call(Delivery, Call("POST", path_of(_WEBHOOKS, webhook_id, "test"), repeatable=False))

    def deliveries(
        self, webhook_id: str, *, state: DeliveryState | str | None = None, page_size: int = PAGE_SIZE
    ) -> AsyncGenerator[Delivery, None]:
        """Iterate over the messages to a webhook, newest first, fetched page by page.

        Args:
            webhook_id: the webhook.
            state: only messages in this state, for example `dead`.
            page_size: messages of one request.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        filters = {"state": state, "limit": page_size}
        return self._core.rows(DeliveryPage, Call("GET", path_of(_WEBHOOKS, webhook_id, "deliveries"), filters))

    async def resend(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send a message again, with all attempts before it.

        Raises:
            NotFoundError: when there is no such message.
        """
        path = path_of(path_of(_WEBHOOKS, webhook_id, "deliveries"), delivery_id, "resend")
        return await self._core.call(Delivery, Call("POST", path, repeatable=True))
