"""Tests of ``tuner.training.launching``."""
