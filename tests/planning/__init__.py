"""Tests of ``tuner.planning``."""
