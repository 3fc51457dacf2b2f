"""Tests of ``batchwright.training.coupling``."""
