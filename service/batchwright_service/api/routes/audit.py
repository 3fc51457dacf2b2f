"""The route of `/v1/audit`."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Query
from pydantic import WithJsonSchema

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.audit import AuditAction, AuditPage
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import Limit, Moment, Total
from batchwright_service.api.problems import declared
from batchwright_service.api.strict_route import strict_router
from batchwright_service.store.models import AuditFilter

router = strict_router("keys", "/v1/audit", Scope.ADMIN)

_ID_PATTERN = "^[a-z0-9_]+$"
_ACTION = {"type": "string", "enum": [action.value for action in AuditAction]}
_Action = Annotated[AuditAction | None, WithJsonSchema(_ACTION), Query(description="Return only acts of this kind.")]
_Exclude = Annotated[
    list[AuditAction] | None,
    WithJsonSchema({"type": "array", "items": _ACTION}),
    Query(description="Leave out acts of this kind. Repeat the parameter for several kinds."),
]
_KeyId = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "maxLength": 16, "pattern": _ID_PATTERN}),
    Query(max_length=16, pattern=_ID_PATTERN, description="Return only acts of the caller with this API key."),
]
_ObjectId = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "maxLength": 64, "pattern": _ID_PATTERN}),
    Query(max_length=64, pattern=_ID_PATTERN, description="Return only acts on this tuning, job or key."),
]
_After = Annotated[Moment, Query(description="Return only acts after this time, with a time zone.")]
_Until = Annotated[Moment, Query(description="Return only acts until this time, with a time zone.")]
_Cursor = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "maxLength": 40, "pattern": "^a[1-9][0-9]{0,17}$"}),
    Query(max_length=40, description="`next_cursor` of the previous page."),
]


@router.get("", summary="Read the audit log", responses=declared(HTTPStatus.BAD_REQUEST))
def list_audit(  # noqa: PLR0913, PLR0917 - one parameter per filter
    context: Context,
    action: _Action = None,
    key_id: _KeyId = None,
    object_id: _ObjectId = None,
    after: _After = None,
    until: _Until = None,
    exclude: _Exclude = None,
    limit: Limit = 50,
    cursor: _Cursor = None,
    *,
    total: Total = False,
) -> AuditPage:
    """List who submitted, cancelled or deleted work, made or revoked API keys, and signed in, newest first.

    An entry is written in the transaction of its act and never changed. It is deleted after the operator's retention.
    """
    wanted = AuditFilter(action, key_id, object_id, after, until, tuple(exclude or ()))
    return context.audit.page(wanted, limit, cursor, total=total)
