"""Tests of ``batchwright.exports``."""
