"""Tests of ``batchwright_service.entrypoints``."""
