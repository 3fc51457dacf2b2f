"""Tests of ``tuner.schemas``."""
