"""Tests of ``batchwright.schemas``."""
