"""Tests of ``tuner.hardware``."""
