"""The routes of `/v1/webhooks`."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Path, Query, Response
from pydantic import WithJsonSchema

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.webhooks import (
    Delivery,
    DeliveryPage,
    DeliveryState,
    SecretRotation,
    WebhookList,
    WebhookSubmission,
    WebhookWithSecret,
)
from batchwright_service.api.authentication import CurrentCaller
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import Limit, strict_body
from batchwright_service.api.problems import BODY_STATUSES, declared
from batchwright_service.api.responses import Responses, links
from batchwright_service.api.strict_route import strict_router

router = strict_router("webhooks", "/v1/webhooks", Scope.ADMIN)

_CREATED: Responses = {
    201: {"description": "Registered.", "links": links("webhook_id", "id", "listDeliveries", "testWebhook")}
}
_NO_STORE = {"Cache-Control": "no-store"}
WebhookId = Annotated[
    str, Path(description="Identifier of a webhook.", examples=["whk_0192f3a1b2c3700089abcdef01234567"])
]
DeliveryId = Annotated[
    str, Path(description="Identifier of a message.", examples=["msg_0192f3a1b2c3700089abcdef01234567"])
]
_State = Annotated[
    DeliveryState | None,
    WithJsonSchema({"type": "string", "enum": [state.value for state in DeliveryState]}),
    Query(description="Return only deliveries in this state."),
]
_Cursor = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "maxLength": 40, "pattern": "^m[0-9a-f]{32}$"}),
    Query(max_length=40, description="`next_cursor` of the previous page."),
]


@router.get("", summary="List the webhooks")
def list_webhooks(context: Context) -> WebhookList:
    """List all webhooks, oldest first, without their secrets, with the counts of what is not delivered."""
    return context.webhooks.list()


@router.post(
    "",
    summary="Register a webhook",
    status_code=HTTPStatus.CREATED,
    responses=_CREATED | declared(*BODY_STATUSES, HTTPStatus.CONFLICT),
)
def create_webhook(
    submission: Annotated[WebhookSubmission, strict_body(WebhookSubmission)],
    caller: CurrentCaller,
    context: Context,
    response: Response,
) -> WebhookWithSecret:
    """Register a receiver of messages about tunings and jobs that end. The response shows `secret`, this once.

    Messages are signed as in Standard Webhooks, and delivered at least once. The operator allows hosts with
    `BATCHWRIGHT_WEBHOOK_HOSTS`. This route takes no `Idempotency-Key`, because a response that holds a secret is not
    stored.
    """
    response.headers.update(_NO_STORE)
    return context.webhooks.create(submission, caller)


@router.delete(
    "/{webhook_id}",
    summary="Delete a webhook",
    status_code=HTTPStatus.NO_CONTENT,
    responses=declared(HTTPStatus.NOT_FOUND),
)
def delete_webhook(webhook_id: WebhookId, caller: CurrentCaller, context: Context) -> Response:
    """Delete a webhook with its messages, those that are not delivered included."""
    context.webhooks.delete(webhook_id, caller)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.post(
    "/{webhook_id}/rotate",
    summary="Replace the secret of a webhook",
    responses=declared(*BODY_STATUSES, HTTPStatus.NOT_FOUND),
)
def rotate_webhook_secret(
    webhook_id: WebhookId,
    rotation: Annotated[SecretRotation, strict_body(SecretRotation)],
    caller: CurrentCaller,
    context: Context,
    response: Response,
) -> WebhookWithSecret:
    """Replace the secret. The response shows the new one, this once; the old one signs too for `overlap_seconds`."""
    response.headers.update(_NO_STORE)
    return context.webhooks.rotate(webhook_id, rotation, caller)


@router.post(
    "/{webhook_id}/test",
    summary="Send a test message",
    status_code=HTTPStatus.ACCEPTED,
    responses=declared(HTTPStatus.NOT_FOUND),
)
def test_webhook(webhook_id: WebhookId, context: Context) -> Delivery:
    """Send a message of the type `webhook.test`. Its delivery is in the list."""
    return context.webhooks.test(webhook_id)


@router.get(
    "/{webhook_id}/deliveries",
    summary="List the deliveries to a webhook",
    responses=declared(HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND),
)
def list_deliveries(
    webhook_id: WebhookId, context: Context, state: _State = None, limit: Limit = 50, cursor: _Cursor = None
) -> DeliveryPage:
    """List the messages to a webhook, newest first, with their attempts and the last error.

    Delivered messages are kept for seven days, and those whose last attempt failed for thirty.
    """
    return context.webhooks.deliveries(webhook_id, limit, cursor, state)


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/resend",
    summary="Send a message again",
    status_code=HTTPStatus.ACCEPTED,
    responses=declared(HTTPStatus.NOT_FOUND),
)
def resend_delivery(webhook_id: WebhookId, delivery_id: DeliveryId, context: Context) -> Delivery:
    """Send a message again, with all attempts before it. It has the same `webhook-id` and the same body."""
    return context.webhooks.send_again(webhook_id, delivery_id)
