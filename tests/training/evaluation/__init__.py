"""Tests of ``batchwright.training.evaluation``."""
