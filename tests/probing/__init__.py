"""Tests of ``batchwright.probing``."""
