"""Stored rows as the documents that the API returns, and cursors."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any

from service.domain import Job, JobRequest, JobSummary, Tuning, TuningSummary
from service.errors import InvalidCursorError
from service.store.base import WorkItem, WorkRow
from tuner.requests import TuningRequest
from tuner.results import Recommendation

_IDENTIFIER = re.compile(r"(tun|job|rec)_[0-9a-f]{32}")

_COMMON = (
    "id",
    "state",
    "device",
    "model",
    "effective_batch_size",
    "attempts",
    "created_at",
    "started_at",
    "ended_at",
    "updated_at",
    "events",
    "recommendation_id",
    "key_id",
)
_OF_TUNINGS = ("fingerprint", "probes", "earlier_recommendation_id")


def is_identifier(text: str) -> bool:
    """Whether this service could have made it."""
    return _IDENTIFIER.fullmatch(text) is not None


def _fields(row: WorkRow, *more: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in (*_COMMON, *more)}


def tuning_summary(row: WorkRow) -> TuningSummary:
    """A tuning in a list."""
    return TuningSummary(**_fields(row, *_OF_TUNINGS))


def tuning(item: WorkItem, recommendation: Recommendation | None) -> Tuning:
    """A tuning in full."""
    return Tuning(
        **_fields(item, *_OF_TUNINGS, "place", "problem"),
        request=TuningRequest.model_validate_json(item.payload),
        recommendation=recommendation,
    )


def job_summary(row: WorkRow) -> JobSummary:
    """A job in a list."""
    return JobSummary(**_fields(row))


def job(item: WorkItem, runs_dir: Path) -> Job:
    """A job in full."""
    request = JobRequest.model_validate_json(item.payload)
    return Job(
        **_fields(item, "place", "problem", "progress", "result"),
        training=request.training,
        recommendation=request.recommendation,
        directory=str(runs_dir / item.id),
    )


def encode_cursor(identifier: str) -> str:
    """A position in a list, opaque to callers."""
    return base64.urlsafe_b64encode(identifier.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """The identifier that a cursor stands for.

    Raises:
        InvalidCursorError: when it is not one of ours.
    """
    if cursor is None:
        return None
    try:
        identifier = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        identifier = ""
    if not is_identifier(identifier):
        raise InvalidCursorError("cursor: pass `next_cursor` of the page before, unchanged")
    return identifier
