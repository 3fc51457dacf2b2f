"""Parameters that routes share, and the dependencies of long polls and event streams."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, get_args

from fastapi import Depends, Header, Path, Query, Request
from pydantic import BeforeValidator, ValidationError, WithJsonSchema, WrapValidator

from service.api.authentication import Calling, identify
from service.api.context import Context
from service.api.events.streaming import Watch
from service.application.views import PREFIXES
from service.domain.api_keys import Caller
from service.domain.states import State, WorkKind
from service.errors import MAX_FAULTS
from service.store.models import Idempotency
from tuner.schemas.base import Document
from tuner.schemas.field_errors import described_pattern, reworded
from tuner.schemas.requests import Objective
from tuner.schemas.workload import Precision

_LARGEST_EVENT_ID = 2**31 - 1


async def _watching(request: Request, context: Context) -> Watch:
    async def standing() -> Caller:
        return (await identify(context.doors, request.scope)).caller

    return Watch(context.feed, context.reads, standing)


Watching = Annotated[Watch, Depends(_watching)]


def identified_by(kind: WorkKind) -> Any:  # noqa: ANN401 - what FastAPI's `Path` gives
    """The path's parameter that identifies work of a kind, whatever the endpoint calls it."""
    example = f"{PREFIXES[kind]}_0192f3a1b2c3700089abcdef01234567"
    return Path(alias=f"{kind}_id", description=f"Identifier of a {kind}.", examples=[example])


TuningId = Annotated[str, identified_by(WorkKind.TUNING)]
JobId = Annotated[str, identified_by(WorkKind.JOB)]
RecommendationId = Annotated[
    str, Path(description="Identifier of a recommendation.", examples=["rec_0192f3a1b2c3700089abcdef01234567"])
]
Wait = Annotated[
    float,
    Query(
        ge=0.0,
        le=60.0,
        allow_inf_nan=False,
        description="Seconds to wait for its end before answering with what there is. With `If-None-Match` the answer "
        "comes as soon as the representation is another one than that.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=200, description="Most rows to return.")]
Tail = Annotated[int, Query(ge=1, le=4 * 1024**2, description="Bytes to return, counted from the end of the log.")]


# --- what may be left out: `null` cannot be written in a query, so that the document does not offer it ---


def _text(**schema: object) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **schema})


_PAGE_BEFORE = "`next_cursor` of the page before."
TuningCursor = Annotated[str | None, _text(pattern="^t[0-9a-f]{32}$"), Query(max_length=200, description=_PAGE_BEFORE)]
JobCursor = Annotated[str | None, _text(pattern="^j[0-9a-f]{32}$"), Query(max_length=200, description=_PAGE_BEFORE)]
RecommendationCursor = Annotated[
    str | None, _text(pattern="^r[0-9a-f]{32}$"), Query(max_length=200, description=_PAGE_BEFORE)
]
"""What has the shape of a list's cursor is one; anything else is `invalid-cursor`."""

_NO_CONTROL_CHARACTERS = described_pattern(r"^[^\x00-\x1f]*$", "must not contain control characters")
_NAME = _text(maxLength=300, pattern=_NO_CONTROL_CHARACTERS)

_HEXADECIMAL = described_pattern("^[0-9a-f]*$", "must consist of the hexadecimal digits 0 to 9 and a to f")
FingerprintFilter = Annotated[
    str | None,
    _text(maxLength=64, pattern=_HEXADECIMAL),
    Query(max_length=64, pattern=_HEXADECIMAL, description="Only what has this fingerprint."),
]
DeviceFilter = Annotated[
    str | None,
    _NAME,
    Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description="Only this device, by its id."),
]
DeviceOrNameFilter = Annotated[
    str | None,
    _NAME,
    Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description="Only this device: its id or product name."),
]
ModelFilter = Annotated[
    str | None,
    _NAME,
    Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description="Only this model, by its short name."),
]


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


_STATES = {"type": "array", "items": {"type": "string", "enum": [state.value for state in State]}}
StateFilter = Annotated[
    list[Annotated[State, BeforeValidator(_upper)]] | None,
    WithJsonSchema(_STATES),
    Query(description="Only what is in this state. May be repeated: what is in any of them. Of either letter case."),
]
PrecisionFilter = Annotated[
    Precision | None, _text(enum=list(get_args(Precision))), Query(description="Only what has this precision.")
]
ObjectiveFilter = Annotated[
    Objective | None, _text(enum=list(get_args(Objective))), Query(description="Only what was tuned for this.")
]
LONGEST_TAGS = 2000
IfNoneMatch = Annotated[
    str | None,
    _text(maxLength=LONGEST_TAGS),
    Header(alias="If-None-Match", max_length=LONGEST_TAGS, description="The `ETag` of what is known: then 304."),
]
LastEventId = Annotated[
    int,
    Header(
        alias="Last-Event-ID", ge=0, le=_LARGEST_EVENT_ID, description="Send only events after this one: how to resume."
    ),
]

_KEY_PATTERN = described_pattern("^[!-~]+$", "must consist of printable ASCII characters without spaces")
_Key = Annotated[
    str | None,
    _text(minLength=1, maxLength=255, pattern=_KEY_PATTERN),
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=_KEY_PATTERN,
        description="Any text of the caller's that is new for each request, such as a UUID. The same request sent "
        "again under it within a day is given the first answer and creates nothing; another request is refused with "
        "422. What was refused is not remembered.",
    ),
]


async def _once(request: Request, caller: Calling, key: _Key = None) -> Idempotency | None:
    if key is None:
        return None
    asked = f"{request.method} {request.url.path}\n".encode() + await request.body()
    return Idempotency(caller.key_id or "", key, hashlib.sha256(asked).hexdigest())


Once = Annotated[Idempotency | None, Depends(_once)]
"""The request's idempotency key, if it has one, with what it asks."""


def strictly(document: type[Document]) -> WrapValidator:
    """A body that is JSON of exactly this shape: 0 is no `false`, "7" no number, and NaN no JSON."""

    def read(value: object, _: object) -> object:
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("holds NaN or an infinite number, which JSON does not have") from None
        try:
            return document.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise reworded(error, document, MAX_FAULTS) from None

    return WrapValidator(read)
