"""The routes of `/v1/keys`."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Path, Response

from batchwright.client.documents.api_keys import ApiKey, CreatedKey, KeyList, KeySubmission, Scope
from batchwright_service.api.authentication import CurrentCaller
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import strict_body
from batchwright_service.api.problems import BODY_STATUSES, declared
from batchwright_service.api.responses import Responses, links
from batchwright_service.api.strict_route import strict_router

router = strict_router("keys", "/v1/keys", Scope.ADMIN)

_CREATED: Responses = {201: {"description": "Created.", "links": links("key_id", "id", "revokeKey")}}
KeyId = Annotated[str, Path(description="Identifier of an API key.", examples=["0192f3a1b2c37000"])]


@router.get("", summary="List the API keys")
def list_keys(context: Context) -> KeyList:
    """List all API keys, revoked and expired ones included, oldest first, without their secrets."""
    return context.keys.list()


@router.post(
    "",
    summary="Create an API key",
    status_code=HTTPStatus.CREATED,
    responses=_CREATED | declared(*BODY_STATUSES),
)
def create_key(
    submission: Annotated[KeySubmission, strict_body(KeySubmission)],
    caller: CurrentCaller,
    context: Context,
    response: Response,
) -> CreatedKey:
    """Create an API key. The response holds its text in `key`, which is not stored and not shown again.

    The first key of a service is created by `batchwright admin keys create` instead. This route takes no
    `Idempotency-Key`, because a response that holds a key is not stored. When a response was lost, revoke the newest
    key of that name.
    """
    response.headers["Cache-Control"] = "no-store"
    return context.keys.create(submission, caller)


@router.delete("/{key_id}", summary="Revoke an API key", responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT))
def revoke_key(key_id: KeyId, caller: CurrentCaller, context: Context) -> ApiKey:
    """Revoke an API key for good. The key is refused within five seconds, and stays in the list.

    Work that was submitted with the key continues. Repeating this is harmless. A key cannot revoke itself: 409,
    `own-key`.
    """
    return context.keys.revoke(key_id, caller)
