"""Tests of ``batchwright.client``."""
