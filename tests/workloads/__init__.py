"""Tests of ``tuner.workloads``."""
