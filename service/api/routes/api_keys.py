"""/v1/keys."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from service.api import examples
from service.api.authentication import Calling, needs
from service.api.context import Context
from service.api.dependencies import strictly
from service.api.problems import ALWAYS, declared
from service.api.responses import Responses, links
from service.api.strict_route import StrictRoute
from service.domain.api_keys import ApiKey, CreatedKey, KeyList, KeySubmission, Scope

router = APIRouter(prefix="/v1/keys", tags=["keys"], responses=ALWAYS, route_class=StrictRoute)

_MADE: Responses = {201: {"description": "Made.", "links": links("key_id", "id", "revokeKey")}}
KeyId = Annotated[str, Path(description="Identifier of an API key.", examples=["0192f3a1b2c37000"])]


@router.get("", operation_id="listKeys", summary="List the API keys", dependencies=[needs(Scope.ADMIN)])
def list_keys(context: Context) -> KeyList:
    """Every key there ever was, oldest first, without what makes it a key."""
    return context.keys.list()


@router.post(
    "",
    operation_id="createKey",
    summary="Make an API key",
    dependencies=[needs(Scope.ADMIN)],
    status_code=HTTPStatus.CREATED,
    responses=_MADE
    | declared(
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
)
def create_key(
    submission: Annotated[
        KeySubmission, strictly(KeySubmission), Body(openapi_examples=examples.REQUESTS["KeySubmission"])
    ],
    caller: Calling,
    context: Context,
    response: Response,
) -> CreatedKey:
    """Make a key. The answer holds its text in `key`, which is stored nowhere and is not shown again.

    The first key of a service is not made here: `batchwright keys create` makes it. Since no answer is kept that holds
    a key, there is no `Idempotency-Key`: when an answer was lost, revoke the newest key of that name.
    """
    response.headers["Cache-Control"] = "no-store"
    return context.keys.create(submission, caller)


@router.delete(
    "/{key_id}",
    operation_id="revokeKey",
    summary="Revoke an API key",
    dependencies=[needs(Scope.ADMIN)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def revoke_key(key_id: KeyId, caller: Calling, context: Context) -> ApiKey:
    """End a key for good; what it submitted goes on. It is refused within five seconds, and stays in the list.

    Repeating this is harmless. The key of the call itself is not revoked: 409, `own-key`.
    """
    return context.keys.revoke(key_id, caller)
