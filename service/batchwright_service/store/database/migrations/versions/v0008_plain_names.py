"""Columns and stored documents take the names of the field: plan, largest micro-batch size, slot, request fingerprint.

Recommendations hold their plan as one object, apart from the size that was proven. They are stored in several places:
in their own table, in the jobs made from them, and in the first responses kept for idempotency keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008_plain_names"
down_revision = "0007_searching"
branch_labels = None
depends_on = None

_AT_ONCE = 100
"""Documents that are read and written together: some hundred kilobytes each at most."""
_COLUMNS = {
    "recommendations": {"micro_batch_size": "largest_micro_batch_size"},
    "work_items": {
        "place": "slot",
        "earlier_recommendation_id": "warm_start_from",
        "question": "request_fingerprint",
    },
    "workers": {"place": "slot"},
}
_TABLES = {"stored_answers": "recommendation_hits"}
_TOP_LEVEL = {"place": "slot", "earlier_recommendation_id": "warm_start_from"}
"""Fields of a tuning, a job and a served device."""
_STOPPED_BY = {"earlier-answer": "warm-start"}
_WARNINGS = {"rests-on-earlier-answer": "rests-on-warm-start"}
_FIGURES = ("gradient_accumulation_steps", "micro_batch_size", "world_size")

_Fields = dict[str, Any]


def upgrade() -> None:
    """Rename, and rewrite every stored document."""
    op.drop_index("work_items_by_earlier_recommendation_id", "work_items")
    op.drop_index("work_items_by_question", "work_items")
    _rename(_COLUMNS, _TABLES)
    op.create_index("work_items_by_warm_start_from", "work_items", ["warm_start_from"])
    op.create_index("work_items_by_request_fingerprint", "work_items", ["request_fingerprint", "id"])
    op.add_column("recommendations", sa.Column("micro_batch_size", sa.BigInteger))
    share = "(effective_batch_size + world_size - 1) / world_size"
    op.execute(
        f"UPDATE recommendations SET micro_batch_size = ({share} + gradient_accumulation_steps - 1)"  # noqa: S608 - ours
        " / gradient_accumulation_steps WHERE gradient_accumulation_steps IS NOT NULL"
    )
    _rewrite_all(recommendation_with_plan, _TOP_LEVEL)


def downgrade() -> None:
    """Take the names of before."""
    op.drop_column("recommendations", "micro_batch_size")
    op.drop_index("work_items_by_warm_start_from", "work_items")
    op.drop_index("work_items_by_request_fingerprint", "work_items")
    _rename({table: _swapped(names) for table, names in _COLUMNS.items()}, _swapped(_TABLES))
    op.create_index("work_items_by_earlier_recommendation_id", "work_items", ["earlier_recommendation_id"])
    op.create_index("work_items_by_question", "work_items", ["question", "id"])
    _rewrite_all(recommendation_without_plan, _swapped(_TOP_LEVEL))


def recommendation_with_plan(old: _Fields) -> _Fields:
    """A recommendation of a service before this revision, as it is read from now on."""
    new = dict(old)
    steps, size, ranks, sizes, batch = (
        new.pop(name, None)
        for name in (
            "gradient_accumulation_steps",
            "micro_batch_size",
            "world_size",
            "micro_batch_sizes",
            "effective_batch_size",
        )
    )
    plan = None
    if sizes:
        plan = _plan(steps, max(map(max, sizes)), ranks, batch) | {"micro_batch_sizes": sizes}
    if new.get("uniform"):
        new["uniform"] = _flat_uniform(new["uniform"])
    new["what_ifs"] = [_what_if_with_plan(it, batch["requested"], ranks) for it in new.get("what_ifs", ())]
    named = _with_words(new, ("earlier", "warm_start"), _STOPPED_BY, _WARNINGS)
    return {"plan": plan, "largest_micro_batch_size": size, **named}


def recommendation_without_plan(new: _Fields) -> _Fields:
    """A recommendation as a service before this revision reads it."""
    old = dict(new)
    plan, size = old.pop("plan"), old.pop("largest_micro_batch_size")
    request = old["request"]
    asked = request["effective_batch_size"]
    old["micro_batch_size"] = size
    old["world_size"] = request["spec"].get("parallelism", {}).get("world_size", 1)
    old["gradient_accumulation_steps"] = plan and plan["gradient_accumulation_steps"]
    old["micro_batch_sizes"] = plan["micro_batch_sizes"] if plan else []
    old["effective_batch_size"] = _nested(plan["effective_batch_size"] if plan else 0, asked)
    if old.get("uniform"):
        old["uniform"] = _nested_uniform(old["uniform"])
    old["what_ifs"] = [_what_if_without_plan(it) for it in old.get("what_ifs", ())]
    return _with_words(old, ("warm_start", "earlier"), _swapped(_STOPPED_BY), _swapped(_WARNINGS))


def _plan(steps: int, size: int, ranks: int, batch: _Fields) -> _Fields:
    """The summary of a plan; ``batch`` as it was nested before."""
    return {
        "gradient_accumulation_steps": steps,
        "micro_batch_size": size,
        "world_size": ranks,
        "effective_batch_size": batch["achieved"],
        "requested_effective_batch_size": batch["requested"],
        "exact": batch["exact"],
    }


def _nested(batch: int, requested: int) -> _Fields:
    return {"requested": requested, "achieved": batch, "exact": batch == requested}


def _flat_uniform(old: _Fields) -> _Fields:
    steps, size, ranks = (old[name] for name in _FIGURES)
    plan = _plan(steps, size, ranks, old["effective_batch_size"])
    return plan | {name: old[name] for name in ("change", "nearest")}


def _nested_uniform(new: _Fields) -> _Fields:
    kept = {name: new[name] for name in (*_FIGURES, "change", "nearest")}
    batch = _nested(new["effective_batch_size"], new["requested_effective_batch_size"])
    return kept | {"effective_batch_size": batch}


def _what_if_with_plan(old: _Fields, batch: int, ranks: int) -> _Fields:
    """The plan follows from the steps: a rank's share is divided as evenly as whole samples allow."""
    new = dict(old)
    size, steps = new.pop("largest_micro_batch"), new.pop("gradient_accumulation_steps", None)
    share = -(-batch // ranks)
    plan = _plan(steps, -(-share // steps), ranks, _nested(batch, batch)) if steps else None
    return {**new, "plan": plan, "largest_micro_batch_size": size}


def _what_if_without_plan(new: _Fields) -> _Fields:
    old = dict(new)
    plan, size = old.pop("plan"), old.pop("largest_micro_batch_size")
    return {
        **old,
        "largest_micro_batch": size,
        "gradient_accumulation_steps": plan and plan["gradient_accumulation_steps"],
    }


def _with_words(found: _Fields, start: tuple[str, str], proofs: dict[str, str], warnings: dict[str, str]) -> _Fields:
    """Rename the warm start of the evidence, what stops searches, and warnings."""
    before, after = start
    evidence = {after if name == before else name: value for name, value in found.get("evidence", {}).items()}
    if evidence.get(after):
        evidence[after] = _with_proof(evidence[after], proofs)
    listed = [{**it, "code": warnings.get(it["code"], it["code"])} for it in found.get("warnings", ())]
    return {**found, "evidence": _with_proof(evidence, proofs), "warnings": listed}


def _with_proof(found: _Fields, names: dict[str, str]) -> _Fields:
    proof = found.get("proof", {})
    word = proof.get("stopped_by")
    return {**found, "proof": {**proof, "stopped_by": names.get(word, word)}}


# --- the database ---


def _swapped(names: dict[str, str]) -> dict[str, str]:
    return {after: before for before, after in names.items()}


def _rename(columns: dict[str, dict[str, str]], tables: dict[str, str]) -> None:
    """Rename in place: indexes follow, on both databases."""
    for table, names in columns.items():
        for before, after in names.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {after}")
    for before, after in tables.items():
        op.rename_table(before, after)


def _rewrite_all(change: Callable[[_Fields], _Fields], names: dict[str, str]) -> None:
    def with_names(document: _Fields) -> _Fields:
        renamed = {names.get(name, name): value for name, value in document.items()}
        if renamed.get("recommendation"):
            renamed["recommendation"] = change(renamed["recommendation"])
        return renamed

    _rewrite("recommendations", ["id"], "document", change)
    _rewrite("work_items", ["id"], "payload", with_names, kind="job")
    _rewrite("idempotency_keys", ["owner", "key"], "body", with_names)
    _rewrite("workers", [names.get("place", "place")], "document", with_names)


def _rewrite(table: str, keys: list[str], column: str, change: Callable[[_Fields], _Fields], **only: str) -> None:
    """Rewrite the JSON of a column, part by part in the order of the primary key."""
    rows = sa.table(table, *(sa.column(name) for name in [*keys, column, *only]))
    key = sa.tuple_(*(rows.c[name] for name in keys))
    wanted = [rows.c[name] == value for name, value in only.items()]
    parts = sa.select(*(rows.c[name] for name in keys), rows.c[column]).where(*wanted).limit(_AT_ONCE)
    parts = parts.order_by(*(rows.c[name] for name in keys))
    one = [rows.c[name] == sa.bindparam(f"of_{name}") for name in keys]
    rewrite = sa.update(rows).where(*one).values({column: sa.bindparam("rewritten")})
    connection, part = op.get_bind(), parts
    while found := connection.execute(part).all():
        values = [
            {f"of_{name}": value for name, value in zip(keys, row, strict=False)}
            | {"rewritten": _text(change(json.loads(row[-1])))}
            for row in found
        ]
        connection.execute(rewrite, values)
        part = parts.where(key > sa.tuple_(*(sa.literal(value) for value in found[-1][:-1])))


def _text(document: _Fields) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
