"""Run by Alembic: migrates over the connection that ``service.store.database.migrate`` opened, in its transaction."""

from __future__ import annotations

from alembic import context

from service.store.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the transaction is the caller's: nothing is applied by halves
)
context.run_migrations()
