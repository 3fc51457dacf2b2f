"""Tests of ``batchwright.cli``."""
