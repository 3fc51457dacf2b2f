"""Tests of ``batchwright.training.data``."""
