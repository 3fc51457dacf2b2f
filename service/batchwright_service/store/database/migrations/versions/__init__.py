"""List the revisions of the schema, one module each, named `vNNNN_subject`.

A revision is never edited, which a test checks by its hash: a new module names the one before it in `down_revision`.
There are no downgrades. The tests compare what all revisions make with ``batchwright_service.store.database.schema``.
"""
