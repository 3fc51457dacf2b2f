"""Tests of ``tuner.planning.learning``."""
