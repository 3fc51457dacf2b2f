"""Tests of ``service.store``."""
