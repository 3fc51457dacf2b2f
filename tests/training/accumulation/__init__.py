"""Tests of ``batchwright.training.accumulation``."""
