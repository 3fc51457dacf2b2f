"""Tests of ``batchwright.planning.learning``."""
