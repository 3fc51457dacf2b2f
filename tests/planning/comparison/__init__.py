"""Tests of ``batchwright.planning.comparison``."""
