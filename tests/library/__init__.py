"""Tests of ``batchwright.library``."""
