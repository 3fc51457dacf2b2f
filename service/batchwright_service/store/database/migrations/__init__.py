"""Hold the history of the schema, for Alembic.

``versions`` has one module per revision, in order; ``env`` runs them on an open connection.
``batchwright_service.store.database.migrate`` applies them when a store is opened; nothing imports this package.
"""
