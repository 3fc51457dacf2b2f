"""Tests of ``batchwright_service.webhooks``."""
