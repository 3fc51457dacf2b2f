"""Tests of ``batchwright.workloads``."""
