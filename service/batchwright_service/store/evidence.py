"""Evidence: recorded probes and training progress, the events of a tuning or job, and the residuals of estimates."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, and_, delete, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Event, EventKind, RecordedProbe
from batchwright.schemas.residuals import EstimateResidual
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.training import RunCourse, RunProgress, course_after
from batchwright_service.errors import ConflictError
from batchwright_service.store.database import mapping
from batchwright_service.store.database.schema import estimate_residuals, events, now_ms, probes, work_items
from batchwright_service.store.database.statements import change_held, held_by, stale_lease_error
from batchwright_service.store.database.transactions import insert_or_skip, read_transaction, write_transaction
from batchwright_service.store.models import Binding, Lease

_work = work_items.c
_residual = estimate_residuals.c

RESIDUALS_PER_FAMILY = 64
"""Residuals that are kept of each hardware and family, a kilobyte each: with more, none has any influence."""


class EvidenceStore:
    """Recorded probes, training progress, and their events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult, binding: Binding | None = None) -> None:
        """Record a probe and its event. A repeated call with an equal result is ignored.

        The first probe of a tuning that needs hardware comes with the binding to the kind of device that it ran on.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when the ordinal has another result already.
        """
        document = result.model_dump_json()
        event = EventKind.PROBE, f'{{"ordinal":{ordinal},"result":{document}}}'
        values = {"work_id": lease.work_id, "ordinal": ordinal, "document": document}
        changes: dict[str, Any] = {"probe_count": ordinal, "lost_leases": 0}
        if binding is not None:
            changes |= {name: value for name, value in vars(binding).items() if name != "lane"}
            changes["hardware"] = binding.lane
        try:
            with write_transaction(self._engine) as connection:
                row = change_held(connection, lease, changes, [event])
                connection.execute(insert(probes).values(**values, recorded_at=row["updated_at"]))
        except IntegrityError:  # the primary key: recorded already, when the connection broke after the commit
            recorded = and_(probes.c.work_id == lease.work_id, probes.c.ordinal == ordinal)
            with read_transaction(self._engine) as connection:
                stored = connection.execute(select(probes.c.document).where(recorded)).scalar_one_or_none()
            if stored != document:
                raise ConflictError(f"probe {ordinal} of {lease.work_id!r} is recorded already") from None

    def record_activity(self, lease: Lease, activity: str) -> None:
        """Record what a tuning does now, which is no event.

        Raises:
            StaleLeaseError: when the lease has ended.
        """
        with write_transaction(self._engine) as connection:
            change_held(connection, lease, {"progress": json.dumps(activity)}, [])

    def record_progress(self, lease: Lease, progress: Sequence[RunProgress]) -> None:
        """Record updates, one event each; the last becomes the progress of the job.

        Raises:
            StaleLeaseError: when the lease has ended.
        """
        if not progress:
            return
        documents = [update.model_dump_json() for update in progress]
        recorded = select(_work.progress, _work.course).where(held_by(lease)).with_for_update()
        with write_transaction(self._engine) as connection:
            known = connection.execute(recorded).first()
            if known is None:
                raise stale_lease_error(lease)
            if known.progress != documents[-1]:  # equal: repeated, since the connection broke before the reply
                before = next(iter(RunCourse.readable([known.course] if known.course else [])), None)
                course = course_after(before, progress).model_dump_json()
                values = {"progress": documents[-1], "course": course, "lost_leases": 0}
                change_held(connection, lease, values, [(EventKind.PROGRESS, document) for document in documents])

    def is_measured_elsewhere(self, work_id: str, fingerprint: str) -> bool:
        """Return whether another tuning of this fingerprint, which was claimed before this one, holds a valid lease."""
        own = work_items.alias("own")
        came_before = tuple_(_work.claimed_at, _work.id) < tuple_(own.c.claimed_at, own.c.id)
        is_equal = and_(_work.kind == WorkKind.TUNING, _work.fingerprint == fingerprint)
        is_running = and_(_work.state == State.RUNNING, _work.lease_expires_at > now_ms())
        statement = select(_work.id).where(own.c.id == work_id, is_equal, is_running, came_before).limit(1)
        with read_transaction(self._engine) as connection:
            return connection.execute(statement).first() is not None

    def probes(self, work_id: str) -> list[RecordedProbe]:
        """Return the recorded probes in order; empty for unknown work."""
        statement = select(probes).where(probes.c.work_id == work_id).order_by(probes.c.ordinal)
        with read_transaction(self._engine) as connection:
            return [mapping.recorded_probe(row) for row in connection.execute(statement).mappings()]

    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return the events with ids above ``after``, in order; empty for unknown work."""
        newer = and_(events.c.work_id == work_id, events.c.id > after)
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(events).where(newer).order_by(events.c.id).limit(limit))
            return [mapping.event(row) for row in found.mappings()]

    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """Return the id of the newest event of each piece of work, for polling; unknown work is left out."""
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(_work.id, _work.event_count).where(_work.id.in_(work_ids)))
            return {row.id: row.event_count for row in found}


class ResidualStore:
    """Residuals of estimates, by hardware and family of the workload."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, tuning_id: str, residual: EstimateResidual) -> None:
        """Store the residual of a tuning; a repeated call for the same tuning is ignored.

        Of each hardware and family the newest ``RESIDUALS_PER_FAMILY`` are kept.
        """
        row = {
            "tuning_id": tuning_id,
            "hardware": residual.hardware,
            "family": residual.family,
            "document": residual.model_dump_json(),
        }
        same = and_(_residual.hardware == residual.hardware, _residual.family == residual.family)
        newest = select(_residual.tuning_id).where(same).order_by(_residual.tuning_id.desc())
        with write_transaction(self._engine) as connection:
            insert_or_skip(connection, estimate_residuals, row)
            surplus = connection.execute(newest.offset(RESIDUALS_PER_FAMILY)).scalars().all()
            connection.execute(delete(estimate_residuals).where(_residual.tuning_id.in_(surplus)))

    def newest(self, hardware: str, family: str, limit: int) -> list[EstimateResidual]:
        """Return at most ``limit`` residuals of the family, then at most as many of others on the hardware.

        Both come newest first.
        """
        newest = select(_residual.document).where(_residual.hardware == hardware)
        newest = newest.order_by(_residual.tuning_id.desc()).limit(limit)
        with read_transaction(self._engine) as connection:
            documents = [
                document
                for same in (_residual.family == family, _residual.family != family)
                for document in connection.execute(newest.where(same)).scalars()
            ]
        return EstimateResidual.readable(documents)
