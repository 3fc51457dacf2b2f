"""List the revisions of the schema, one module each, named `vNNNN_subject`.

A published revision is never changed: a new module names the one before it in `down_revision`. The tests upgrade a
database from every revision, and compare the result with ``batchwright_service.store.database.schema``.
"""
