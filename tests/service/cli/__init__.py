"""Tests of ``service.cli``."""
