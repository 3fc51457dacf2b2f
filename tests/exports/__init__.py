"""Tests of ``tuner.exports``."""
