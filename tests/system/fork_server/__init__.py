"""Tests of ``tuner.system.fork_server``."""
