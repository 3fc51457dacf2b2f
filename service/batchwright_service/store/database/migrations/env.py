"""Run by Alembic: migrates in the transaction that ``batchwright_service.store.database.migrate`` opened."""

from alembic import context

from batchwright_service.store.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the transaction is the caller's: nothing is applied by halves
)
context.run_migrations()
