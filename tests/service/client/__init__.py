"""Tests of ``batchwright_service.client``."""
