"""Tests of ``tuner.system``."""
