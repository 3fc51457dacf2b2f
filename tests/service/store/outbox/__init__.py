"""Tests of ``service.store.outbox``."""
