"""Tests of ``tuner.estimation``."""
