"""Tests of ``batchwright_service.api.reads``."""
