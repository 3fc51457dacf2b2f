"""Tests of ``batchwright.estimation``."""
