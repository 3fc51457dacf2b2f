"""Tests of ``batchwright.training.launching``."""
