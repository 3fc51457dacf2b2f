"""Tests of ``batchwright_service.cli``."""
