"""Tests of ``tuner.training.evaluation``."""
