"""Tests of ``tuner.training.accumulation``."""
