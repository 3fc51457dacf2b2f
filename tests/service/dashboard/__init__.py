"""Tests of ``service.dashboard``."""
