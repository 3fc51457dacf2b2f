"""Tests of ``tuner.planning.comparison``."""
