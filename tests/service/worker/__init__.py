"""Tests of ``batchwright_service.worker``."""
