"""Tests of ``batchwright.driving``."""
