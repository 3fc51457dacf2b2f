"""Conversion of rows to documents, and of documents to rows."""

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Row, RowMapping, Table

from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Event, EventKind, RecordedProbe
from batchwright.planning.fingerprint import request_fingerprint
from batchwright.schemas.base import Document
from batchwright.schemas.recommendation import Gain, Recommendation
from batchwright.schemas.requests import Named
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.training import RunProgress, TrainingResult
from batchwright_service.domain.conditions import Conditions
from batchwright_service.domain.hardware import ANY_DEVICE, need_of_lane
from batchwright_service.store.database.schema import api_keys, recommendations, work_items
from batchwright_service.store.models import RecommendationRow, WorkItem, WorkRow

_PROGRESS: TypeAdapter[RunProgress] = TypeAdapter(RunProgress)
_KINDS = {kind.value: kind for kind in WorkKind}
_STATES = {state.value: state for state in State}
_DOCUMENT_COLUMNS = {"payload", "progress", "result", "problem", "document"}


def without_documents(table: Table) -> list[Any]:
    """Return the columns of a table but the large documents."""
    return [column for column in table.columns if column.name not in _DOCUMENT_COLUMNS]


WORK_COLUMNS = without_documents(work_items)
_UNLISTED = {
    "request_fingerprint",
    "fresh",
    "trace_parent",
    "owner",
    "device_ms",
    "claimed_at",
    "lease_expires_at",
    "expiry_check_at",
    "lost_leases",
    "problem_code",
    "sorted_rate",
    "sorted_peak",
}
OWNER = api_keys.c.name.label("key_name")
"""Name of the API key that submitted a piece of work."""
_PLAN = ("gradient_accumulation_steps", "micro_batch_size", "world_size")
"""Columns of the plan."""
_FIGURES = (
    "feasible",
    "largest_micro_batch_size",
    "peak_bytes",
    "limit_bytes",
    "samples_per_second",
    "speedup",
    "speed_source",
)
RELATED = [OWNER, *(recommendations.c[name] for name in (*_PLAN, *_FIGURES))]
"""Columns of a row in a list or document, from other tables of ``RELATED_WORK``: of the key and the recommendation."""
LISTED_WORK = [*(column for column in WORK_COLUMNS if column.name not in _UNLISTED), work_items.c.problem, *RELATED]
"""Columns of a row in a list, from ``RELATED_WORK``."""
RELATED_WORK = work_items.outerjoin(api_keys, api_keys.c.id == work_items.c.key_id).outerjoin(
    recommendations, recommendations.c.id == work_items.c.recommendation_id
)
RECOMMENDATION_COLUMNS = [*without_documents(recommendations), OWNER]
"""Columns of a recommendation in a list, from ``OWNED_RECOMMENDATIONS``."""
OWNED_RECOMMENDATIONS = recommendations.outerjoin(api_keys, api_keys.c.id == recommendations.c.key_id)
PRECISION_OF_COMMANDS = ""
"""Stored precision of a recommendation for a command, which has its own."""


def moment(milliseconds: int) -> datetime:
    """Convert a stored time to an aware one, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)


def moment_or_none(milliseconds: int | None) -> datetime | None:
    """Convert a stored time that may be absent."""
    return None if milliseconds is None else moment(milliseconds)


def _fields(row: Row[Any]) -> dict[str, Any]:
    """Return the fields of every view of a tuning or job."""
    return {
        "id": row.id,
        "kind": _KINDS[row.kind],
        "state": _STATES[row.state],
        "device": row.device or None,
        "hardware": need_of_lane(row.hardware).in_words if row.device == ANY_DEVICE else None,
        "slot": row.slot,
        "name": row.name,
        "project": row.project,
        "labels": labels_of(row.labels),
        "model": row.model,
        "effective_batch_size": row.effective_batch_size,
        "fingerprint": row.fingerprint or None,
        "recommendation_id": row.recommendation_id,
        "warm_start_from": row.warm_start_from,
        "key_id": row.key_id,
        "priority": row.priority,
        "attempts": row.token,
        "probes": row.probe_count,
        "events": row.event_count,
        "created_at": moment(row.created_at),
        "started_at": moment_or_none(row.started_at),
        "ended_at": moment_or_none(row.ended_at),
        "updated_at": moment(row.updated_at),
        "course": json.loads(row.course) if row.course else None,
        "problem": Problem.from_stored(row.problem) if row.problem else None,
    }


def name_values(names: Named) -> dict[str, str | None]:
    """Return the stored columns of names; each label is a line."""
    lines = "".join(f"{key}={value}\n" for key, value in sorted(names.labels.items()))
    return {"name": names.name, "project": names.project, "labels": f"\n{lines}" if lines else None}


def labels_of(text: str | None) -> dict[str, str]:
    """Return the labels of a stored column."""
    return {key: value for key, _, value in (line.partition("=") for line in (text or "").split())}


def version(row: Row[Any]) -> str:
    """Return the version of a row in a list: every change of the row adds an event or sets a later time."""
    return f"{row.id} {row.updated_at} {row.event_count}"


def work_row(row: Row[Any]) -> WorkRow:
    """Return a tuning or job as a list shows it, from the columns ``LISTED_WORK``."""
    return WorkRow(**_fields(row), **_related(row))


def _related(row: Row[Any]) -> dict[str, Any]:
    """Return the fields of other tables: of the API key and the recommendation."""
    plan = None if row.micro_batch_size is None else _plan(row._mapping)  # noqa: SLF001 - public
    return {"owner": row.key_name, "plan": plan, **{name: getattr(row, name) for name in _FIGURES}}


def work_item(row: Row[Any], *, related: bool = True) -> WorkItem:
    """Return a tuning or job in full; without ``related``, the row has the columns of the work alone."""
    fields = _fields(row)
    return WorkItem(
        **fields,
        **(_related(row) if related else {"owner": None}),
        payload=row.payload,
        fresh=bool(row.fresh),
        trace_parent=row.trace_parent,
        progress=_progress(row.progress),
        activity=json.loads(row.progress) if row.progress and fields["kind"] is WorkKind.TUNING else None,
        result=TrainingResult.from_stored(row.result) if row.result else None,
    )


def _progress(text: str | None) -> RunProgress | None:
    """Return the progress; None where it cannot be read, since a job can be claimed and goes on without it."""
    try:
        return None if text is None else _PROGRESS.validate_json(text, extra="ignore")
    except ValidationError:
        return None


def recorded_probe(row: RowMapping) -> RecordedProbe:
    """Return a recorded probe."""
    result = ProbeResult.from_stored(row["document"])
    return RecordedProbe(ordinal=row["ordinal"], recorded_at=moment(row["recorded_at"]), result=result)


def event(row: RowMapping) -> Event:
    """Return an event; its document becomes the field that its kind names."""
    kind = EventKind(row["kind"])
    at = moment(row["at"])
    document: Any = json.loads(row["document"])
    if kind is EventKind.PROBE:
        document = document | {"recorded_at": at}
    fields = {"id": row["id"], "at": at, "kind": kind, kind.value: document}
    return Event.model_validate(fields, extra="ignore")


_UNSHOWN = {*_PLAN, "key_name", "memory_gain", "conclusive"}
"""Columns of a recommendation that are no fields of its row in a list."""


def recommendation_row(row: RowMapping) -> RecommendationRow:
    """Return a recommendation as a list shows it."""
    listed = {name: value for name, value in row.items() if name not in _UNSHOWN}
    listed |= {"precision": row["precision"] or None, "labels": labels_of(row["labels"]), "owner": row["key_name"]}
    plan = None if row["micro_batch_size"] is None else _plan(row)
    return RecommendationRow.model_validate({**listed, "plan": plan, "created_at": moment(row["created_at"])})


def _plan(row: RowMapping) -> dict[str, Any]:
    """Return the summary of the plan of a feasible recommendation, whose batch is exactly the requested one."""
    batch = row["effective_batch_size"]
    given = {"effective_batch_size": batch, "requested_effective_batch_size": batch, "exact": True}
    return {name: row[name] for name in _PLAN} | given


def recommendation_values(
    document: Recommendation, tuning_id: str, model: str, key_id: str | None, slot: str | None = None
) -> dict[str, Any]:
    """Return the stored columns of a recommendation, of the tuning's model, API key and slot."""
    spec = document.request.spec
    request = document.request
    ranks = max((len(probe.ranks) for probe in document.evidence.probes), default=0)
    digest = request_fingerprint(request, document.device, document.environment, ranks)
    return {
        "id": document.id,
        "tuning_id": tuning_id,
        "key_id": key_id,
        **name_values(document.names),
        "created_at": int(document.created_at.timestamp() * 1000),
        "fingerprint": document.fingerprint,
        "model": model,
        "device": document.device.id,
        "device_name": document.device.name,
        "feasible": document.feasible,
        "largest_micro_batch_size": document.largest_micro_batch_size,
        "micro_batch_size": document.plan.micro_batch_size if document.plan else None,
        "gradient_accumulation_steps": document.plan.gradient_accumulation_steps if document.plan else None,
        "world_size": spec.parallelism.world_size,
        "effective_batch_size": document.request.effective_batch_size,
        "precision": PRECISION_OF_COMMANDS if spec.model.kind == "command" else document.request.workload.precision,
        "objective": document.request.objective,
        "limit_bytes": document.headroom.limit_bytes if document.headroom else None,
        **figures_of(document),
        **_gain_values(document.gain),
        "conditions": Conditions.of_recommendation(document, slot).text,
        "request_digest": f"{digest}:{request.memory_limit_bytes or ''}",
        "conclusive": document.evidence.proof.is_conclusive,
        "document": as_json(document),
    }


def figures_of(document: Recommendation) -> dict[str, Any]:
    """Return the stored figures of a recommendation by which lists are sorted."""
    return {
        "peak_bytes": document.headroom.peak_bytes if document.headroom else None,
        "samples_per_second": next((plan.samples_per_second for plan in document.alternatives if plan.chosen), None),
    }


def sort_values(stored: dict[str, Any] | None) -> dict[str, Any]:
    """Return the columns of work by which lists are sorted, from those of its recommendation."""
    given = stored or {}
    rate, peak = given.get("samples_per_second"), given.get("peak_bytes")
    return {"sorted_rate": -1.0 if rate is None else rate, "sorted_peak": -1 if peak is None else peak}


def _gain_values(gain: Gain | None) -> dict[str, Any]:
    before = None if gain is None else gain.baseline_peak_bytes
    return {
        "speedup": None if gain is None else gain.speedup,
        "speed_source": None if gain is None else gain.speed_source,
        "memory_gain": None if gain is None or before is None else (gain.peak_bytes - before) / gain.limit_bytes,
    }


def as_json(document: Document | None) -> str | None:
    """Return a document as it is stored."""
    return None if document is None else document.model_dump_json()
