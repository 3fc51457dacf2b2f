"""Tests of ``batchwright_service.observability``."""
