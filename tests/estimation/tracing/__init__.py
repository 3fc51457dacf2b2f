"""Tests of ``batchwright.estimation.tracing``."""
