"""Tests of ``batchwright.system``."""
