"""Tests of ``batchwright.planning``."""
