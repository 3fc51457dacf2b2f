"""Tests of ``batchwright.system.fork_server``."""
