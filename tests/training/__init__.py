"""Tests of ``batchwright.training``."""
