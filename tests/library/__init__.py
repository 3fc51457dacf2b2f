"""Tests of ``tuner.library``."""
