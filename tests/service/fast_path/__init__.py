"""Tests of ``batchwright_service.fast_path``."""
