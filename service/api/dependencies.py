"""What routes take: the use cases, the feed of changes, and parameters they share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request

from service.api.feed import ChangeFeed
from service.estimating import Estimates
from service.use_cases import UseCases

_LARGEST_EVENT_ID = 2**31 - 1


def _use_cases(request: Request) -> UseCases:
    cases: UseCases = request.app.state.use_cases
    return cases


def _estimates(request: Request) -> Estimates:
    estimates: Estimates = request.app.state.estimates
    return estimates


def _feed(request: Request) -> ChangeFeed:
    feed: ChangeFeed = request.app.state.feed
    return feed


Cases = Annotated[UseCases, Depends(_use_cases)]
Estimating = Annotated[Estimates, Depends(_estimates)]
Feed = Annotated[ChangeFeed, Depends(_feed)]

TuningId = Annotated[
    str, Path(description="Identifier of a tuning.", examples=["tun_0192f3a1b2c3700089abcdef01234567"])
]
JobId = Annotated[str, Path(description="Identifier of a job.", examples=["job_0192f3a1b2c3700089abcdef01234567"])]
RecommendationId = Annotated[
    str, Path(description="Identifier of a recommendation.", examples=["rec_0192f3a1b2c3700089abcdef01234567"])
]
Wait = Annotated[
    float,
    Query(
        ge=0.0,
        le=60.0,
        allow_inf_nan=False,
        description="Seconds to wait for its end before answering with what there is.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=200, description="Most rows to return.")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before.")]


_NO_CONTROL_CHARACTERS = r"^[^\x00-\x1f]*$"

FingerprintFilter = Annotated[
    str | None, Query(max_length=64, pattern=r"^[0-9a-f]*$", description="Only answers with this fingerprint.")
]
DeviceFilter = Annotated[
    str | None,
    Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description="Only this device: its id or product name."),
]
ModelFilter = Annotated[
    str | None,
    Query(max_length=300, pattern=_NO_CONTROL_CHARACTERS, description="Only this model, by its short name."),
]
LastEventId = Annotated[
    int,
    Header(
        alias="Last-Event-ID", ge=0, le=_LARGEST_EVENT_ID, description="Send only events after this one: how to resume."
    ),
]
