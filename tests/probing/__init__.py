"""Tests of ``tuner.probing``."""
