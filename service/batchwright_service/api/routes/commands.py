"""The route of `/v1/commands`."""

from fastapi import Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.commands import CommandList
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import IfNoneMatch
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from batchwright_service.api.responses import on_success
from batchwright_service.api.strict_route import strict_router

router = strict_router("tunings", "/v1/commands", Scope.TUNINGS_READ)

_REVALIDATED = {"Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie"}


@router.get(
    "",
    summary="List the registered commands",
    response_model=CommandList,
    responses=on_success(headers=TAG_HEADERS) | NOT_MODIFIED,
)
async def list_commands(context: Context, if_none_match: IfNoneMatch = None) -> Response:
    """List the training commands that the operator lets callers tune and run, with the JSON Schema of their arguments.

    A spec names one: `{"model": {"kind": "command", "name": ..., "arguments": {...}}}`. The list changes with a restart
    of the service only.
    """
    body = context.commands.list().model_dump_json().encode()
    return conditional(tagged(body), if_none_match, _REVALIDATED)
