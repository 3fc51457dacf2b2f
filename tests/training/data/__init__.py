"""Tests of ``tuner.training.data``."""
