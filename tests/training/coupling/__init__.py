"""Tests of ``tuner.training.coupling``."""
