"""Tests of ``batchwright_service.dashboard``."""
