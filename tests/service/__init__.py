"""Tests of ``batchwright_service``."""
