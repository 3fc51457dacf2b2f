"""Tests of ``batchwright_service.store.outbox``."""
