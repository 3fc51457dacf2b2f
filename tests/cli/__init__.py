"""Tests of ``tuner.cli``."""
