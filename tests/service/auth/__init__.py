"""Tests of ``batchwright_service.auth``."""
