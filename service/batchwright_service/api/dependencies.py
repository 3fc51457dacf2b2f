"""Parameters that routes share, and the dependencies of long polls and event streams."""

import hashlib
import json
import re
from typing import Annotated, Any, get_args

from fastapi import Depends, Header, Path, Query, Request
from pydantic import AwareDatetime, BeforeValidator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticKnownError

from batchwright.client.documents.states import State, WorkKind, WorkOutcome
from batchwright.schemas.base import Document
from batchwright.schemas.field_errors import described_pattern, reworded
from batchwright.schemas.requests import Objective
from batchwright.schemas.workload import Precision
from batchwright_service.api.authentication import CurrentCaller, authenticate
from batchwright_service.api.context import Context
from batchwright_service.api.events.streaming import Follower
from batchwright_service.api.reads.row_streams import RowFormat
from batchwright_service.application.views import PREFIXES
from batchwright_service.domain.callers import Caller
from batchwright_service.errors import MAX_FAULTS
from batchwright_service.store.models import Idempotency, Search, WorkFilter

_LARGEST_EVENT_ID = 2**31 - 1


async def _follower(request: Request, context: Context) -> Follower:
    async def reauthenticate() -> Caller:
        return (await authenticate(context.authenticators, request.scope)).caller

    return Follower(context.feed, context.reads, reauthenticate)


CurrentFollower = Annotated[Follower, Depends(_follower)]


def identified_by(kind: WorkKind) -> Any:  # noqa: ANN401 - the type that FastAPI's `Path` returns
    """Return the path parameter that identifies work of a kind, under any name of the endpoint's argument."""
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
        description="Seconds to wait for the end before responding with the current state. With `If-None-Match` the "
        "response is sent as soon as the representation changes.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=200, description="Maximum number of rows to return.")]
Tail = Annotated[int, Query(ge=1, le=4 * 1024**2, description="Bytes to return, counted from the end of the log.")]


# --- optional parameters: `null` cannot be written in a query, so that the document does not offer it ---


def _text(**schema: object) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **schema})


def _of_words(value: object) -> object:
    """Refuse numbers and other words for truth, which the parser of truth values takes too."""
    if value is not None and value not in {"true", "false"}:
        raise PydanticKnownError("bool_parsing")
    return value


def _with_date(value: object) -> object:
    """Refuse seconds since 1970, which the parser of times takes too."""
    if isinstance(value, str) and not _DATE.match(value):
        raise PydanticKnownError("datetime_parsing", {"error": "no date"})
    return value


_DATE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:")
Moment = Annotated[AwareDatetime | None, BeforeValidator(_with_date), _text(format="date-time")]
"""A time with a time zone, in ISO 8601."""
_PAGE_BEFORE = "`next_cursor` of the previous page."
_ORDER = r"(\.[A-Za-z0-9_-]+)?$"
_CURSOR = Query(max_length=2000, description=_PAGE_BEFORE)
TuningCursor = Annotated[str | None, _text(pattern="^t[0-9a-f]{32}" + _ORDER), _CURSOR]
JobCursor = Annotated[str | None, _text(pattern="^j[0-9a-f]{32}" + _ORDER), _CURSOR]
RecommendationCursor = Annotated[str | None, _text(pattern="^r[0-9a-f]{32}" + _ORDER), _CURSOR]
"""The prefix names the list of a cursor; any other text is refused with `invalid-cursor`."""

_NO_CONTROL_CHARACTERS = described_pattern(r"^[^\x00-\x1f]*$", "must not contain control characters")
_NAME = _text(maxLength=300, pattern=_NO_CONTROL_CHARACTERS)


def _only(items: str) -> Any:  # noqa: ANN401 - the type that FastAPI's `Query` returns
    """Return the filter of the items whose text, such as a name, equals the parameter."""
    return Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description=f"Return only items {items}.")


_HEXADECIMAL = described_pattern("^[0-9a-f]*$", "must consist of the hexadecimal digits 0 to 9 and a to f")
FingerprintFilter = Annotated[
    str | None,
    _text(maxLength=64, pattern=_HEXADECIMAL),
    Query(max_length=64, pattern=_HEXADECIMAL, description="Return only items with this fingerprint."),
]
DeviceFilter = Annotated[str | None, _NAME, _only("of this device, by its id")]
DeviceOrNameFilter = Annotated[str | None, _NAME, _only("of this device, by its id or product name")]
ModelFilter = Annotated[str | None, _NAME, _only("of this model, by its short name")]


_LABEL = described_pattern("^[^=\x00-\x1f]+=[^\x00-\x1f]*$", "must be a key and a value, for example `team=vision`")
_Words = Annotated[
    str,
    Query(
        max_length=200,
        pattern=_NO_CONTROL_CHARACTERS,
        description="Words to find in the name, project, labels, model, device, fingerprint or id, in upper or lower "
        "case. All must match.",
    ),
]
_LabelFilter = Annotated[
    list[Annotated[str, Field(max_length=400, pattern=_LABEL)]] | None,
    WithJsonSchema({"type": "array", "items": {"type": "string", "maxLength": 400, "pattern": _LABEL}}),
    Query(
        alias="label",
        description="Return only items with this label, as `key=value`. Repeat the parameter for several labels.",
    ),
]
_Project = Annotated[str | None, _NAME, _only("of this project")]
_Owner = Annotated[str | None, _NAME, _only("that an API key with this name or id submitted")]
_CODE = described_pattern("^[a-z0-9-]*$", "must be the code of a problem, for example `workload-error`")
_ProblemCode = Annotated[
    str | None,
    _text(maxLength=64, pattern=_CODE),
    Query(max_length=64, pattern=_CODE, description="Return only items that failed with a problem of this code."),
]
_Outcome = Annotated[
    WorkOutcome | None,
    _text(enum=[outcome.value for outcome in WorkOutcome]),
    Query(
        description="Return only items that ended like this. `infeasible`: tunings that succeeded with the proof that "
        "there is no plan."
    ),
]
_CreatedAfter = Annotated[
    Moment, Query(description="Return only items that were created after this time, with a time zone.")
]
_Slot = Annotated[str | None, _NAME, _only("that run on this slot (host and device), or ran there last")]
QueueSlot = Annotated[str | None, _NAME, _only("that the worker of this slot (host and device) can take")]
_SORT = "Field to sort by; with `-` before it, the largest first. Without this parameter, the newest come first."
_WORK_SORTS = (
    *("created", "name", "model", "state", "device", "priority", "probes", "ended"),
    *("effective_batch_size", "peak", "samples_per_second"),
)
_RECOMMENDATION_SORTS = (
    *("created", "name", "model", "device", "objective", "uses"),
    *("effective_batch_size", "peak", "samples_per_second", "speedup"),
)


def _sort(names: tuple[str, ...]) -> Any:  # noqa: ANN401 - the type that FastAPI's `Query` returns
    message = f"must be one of {', '.join(names)}, or one of them after `-`"
    return Query(pattern=described_pattern(f"^-?({'|'.join(names)})$", message), description=_SORT)


_WorkSort = Annotated[str, _sort(_WORK_SORTS)]
_RecommendationSort = Annotated[str, _sort(_RECOMMENDATION_SORTS)]


def _search(q: str, label: list[str] | None, sort: str, **given: Any) -> Search:  # noqa: ANN401 - fields of the search
    pairs = sorted({tuple(text.split("=", 1)) for text in label or ()})
    return Search(
        words=tuple(sorted(set(q.split()))),
        labels=tuple((key, value) for key, value in pairs),
        sort=sort.removeprefix("-"),
        descending=sort.startswith("-"),
        **given,
    )


async def _work_search(  # noqa: PLR0913, PLR0917 - one parameter per filter
    q: _Words = "",
    label: _LabelFilter = None,
    project: _Project = None,
    owner: _Owner = None,
    outcome: _Outcome = None,
    problem_code: _ProblemCode = None,
    created_after: _CreatedAfter = None,
    slot: _Slot = None,
    sort: _WorkSort = "-created",
) -> Search:
    given = {"project": project, "owner": owner, "problem_code": problem_code, "created_after": created_after}
    return _search(q, label, sort, slot=slot, outcome=outcome, **given)


async def _recommendation_search(  # noqa: PLR0913, PLR0917 - as above
    q: _Words = "",
    label: _LabelFilter = None,
    project: _Project = None,
    owner: _Owner = None,
    created_after: _CreatedAfter = None,
    sort: _RecommendationSort = "-created",
) -> Search:
    return _search(q, label, sort, project=project, owner=owner, created_after=created_after)


RecommendationSearch = Annotated[Search, Depends(_recommendation_search)]


_UPPER = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
_STATES = {"type": "array", "items": {"type": "string", "enum": [state.value for state in State]}}
StateFilter = Annotated[
    list[Annotated[State, _UPPER]] | None,
    WithJsonSchema(_STATES),
    Query(
        description="Return only items in this state, in upper or lower case. Repeat the parameter for several states."
    ),
]


async def _work_filter(
    search: Annotated[Search, Depends(_work_search)],
    state: StateFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    fingerprint: FingerprintFilter = None,
) -> WorkFilter:
    states = tuple(sorted(set(state or ())))  # equal filters compare equal
    return WorkFilter(states, device, model, fingerprint, search)


WorkFilters = Annotated[WorkFilter, Depends(_work_filter)]
PrecisionFilter = Annotated[
    Precision | None, _text(enum=list(get_args(Precision))), Query(description="Return only items with this precision.")
]
ObjectiveFilter = Annotated[
    Objective | None,
    _text(enum=list(get_args(Objective))),
    Query(description="Return only items tuned for this objective."),
]
_TRUTH = (BeforeValidator(_of_words), _text(enum=["true", "false"]))
Total = Annotated[
    bool, *_TRUTH, Query(description="Also count the rows of all pages, up to 10,000, as `total` of the page.")
]
Distinct = Annotated[
    bool,
    *_TRUTH,
    Query(
        description="Return only the newest of the matching recommendations with each fingerprint, and the number of "
        "these as its `uses`. `sort=uses` implies it."
    ),
]
StaleFilter = Annotated[
    bool | None,
    *_TRUTH,
    Query(
        description="`true`: return only stale recommendations, whose torch, driver or hardware has changed since, and "
        "which no later tuning has confirmed. `false`: only those that still hold. Those on devices without a live "
        "worker are in neither list."
    ),
]
Format = Annotated[
    RowFormat,
    WithJsonSchema({"type": "string", "enum": [form.value for form in RowFormat]}),
    Query(
        alias="format",
        description="`json`: a page. `csv`, `jsonl`: a stream of all rows that match, from `cursor` on, unlimited. In "
        "CSV, texts that a spreadsheet would read as a formula begin with an apostrophe.",
    ),
]
IfNoneMatch = Annotated[
    str | None,
    _text(maxLength=2000),
    Header(
        alias="If-None-Match",
        max_length=2000,
        description="The `ETag` of a known representation: 304 if current.",
    ),
]
LastEventId = Annotated[
    int,
    Header(
        alias="Last-Event-ID",
        ge=0,
        le=_LARGEST_EVENT_ID,
        description="Send only events after this one, to resume a stream.",
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
        description="A text that the caller chooses for each request, such as a UUID. Within a day, the same request "
        "with the same key gets the current state of the first request's work and creates nothing; 404 if "
        "that work was deleted. Another request with this key is refused with 422. Refused requests are not "
        "stored.",
    ),
]


async def _idempotency(request: Request, caller: CurrentCaller, key: _Key = None) -> Idempotency | None:
    if key is None:
        return None
    content = f"{request.method} {request.url.path}\n".encode() + await request.body()
    return Idempotency(caller.key_id or "", key, hashlib.sha256(content).hexdigest())


IdempotencyHeader = Annotated[Idempotency | None, Depends(_idempotency)]
"""The idempotency key of a request, with a digest of the request; None without the header."""


def strict_body(document: type[Document]) -> WrapValidator:
    """Validate a body without conversions: 0 is not `false`, "7" is not a number, and NaN is not JSON.

    A whole number may have a fraction of zero, as JSON Schema has it.
    """

    def read(value: object, _: object) -> object:
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("holds NaN or an infinite number, which JSON does not have") from None
        try:
            try:
                return document.model_validate_json(text, strict=True)
            except ValidationError as error:
                text = json.dumps(_with_whole_numbers(json.loads(text), error))
            return document.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise reworded(error, document, MAX_FAULTS) from None

    return WrapValidator(read)


def _with_whole_numbers(body: object, error: ValidationError) -> object:
    """Change floats such as 12.0 in a body to integers where ``error`` says that these are needed."""
    for fault in error.errors(include_url=False, include_context=False):
        number = fault["input"]
        if fault["type"] != "int_type" or not isinstance(number, float) or not number.is_integer():
            continue
        holder: Any = None
        inner: Any = body
        key: Any
        for key in fault["loc"]:  # with the names of members of unions, which are no keys
            if (isinstance(inner, dict) and key in inner) or (isinstance(inner, list) and isinstance(key, int)):
                holder, last, inner = inner, key, inner[key]
        if holder is not None and inner == number:
            holder[last] = int(number)
    return body
