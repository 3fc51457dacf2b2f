"""Tests of ``tuner.training``."""
