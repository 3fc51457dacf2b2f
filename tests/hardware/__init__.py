"""Tests of ``batchwright.hardware``."""
