"""Tests of ``batchwright_service.application``."""
