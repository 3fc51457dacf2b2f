"""Recommendations are found by precision and objective, and each page of such a list by an index in its order."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007_searching"
down_revision = "0006_summary"
branch_labels = None
depends_on = None

_AT_ONCE = 1000
"""Recommendations that one statement fills."""
_DEFAULTS = {"precision": "fp32", "objective": "largest"}
_WRITTEN = {
    "sqlite": {
        "precision": "json_extract(document, '$.request.spec.precision')",
        "objective": "json_extract(document, '$.request.objective')",
    },
    "postgresql": {
        "precision": "document::json #>> '{request,spec,precision}'",
        "objective": "document::json #>> '{request,objective}'",
    },
}
_REPLACED = ("model", "device", "device_name")
_WALKED = ((), ("model",), ("device",), ("device_name",), ("device", "model"), ("device_name", "model"))


def upgrade() -> None:
    """Add the columns, filled from the documents; what a document of before leaves out has its default."""
    for name, default in _DEFAULTS.items():
        op.add_column("recommendations", sa.Column(name, sa.String(16), nullable=False, server_default=default))
    _fill()
    for column in _REPLACED:
        op.drop_index(f"recommendations_by_{column}", "recommendations")
    for name, columns in _indexes().items():
        op.create_index(name, "recommendations", columns)


def downgrade() -> None:
    """Drop what was added."""
    for name in _indexes():
        op.drop_index(name, "recommendations")
    for column in _REPLACED:
        op.create_index(f"recommendations_by_{column}", "recommendations", [column, "id"])
    for column in _DEFAULTS:
        op.drop_column("recommendations", column)


def _indexes() -> dict[str, list[str]]:
    walked = ([*columns, *_DEFAULTS] for columns in _WALKED)
    return {"recommendations_by_" + "_".join(columns): [*columns, "id"] for columns in walked}


def _fill() -> None:
    """Part by part, and only what is not the default: SQLite writes a changed row anew, with its whole document."""
    written = _WRITTEN[op.get_context().dialect.name]
    values = {name: f"coalesce({written[name]}, '{default}')" for name, default in _DEFAULTS.items()}
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    differs = " OR ".join(f"{values[name]} <> '{default}'" for name, default in _DEFAULTS.items())
    part = "SELECT id FROM recommendations WHERE id > :last ORDER BY id LIMIT :most"
    last_of = sa.text(f"SELECT max(id) FROM ({part}) AS part")  # noqa: S608 - ours
    fill = sa.text(
        f"UPDATE recommendations SET {changes} WHERE id > :last AND id <= :end AND ({differs})"  # noqa: S608 - ours
    )
    connection = op.get_bind()
    last = ""
    while (end := connection.execute(last_of, {"last": last, "most": _AT_ONCE}).scalar()) is not None:
        connection.execute(fill, {"last": last, "end": end})
        last = end
