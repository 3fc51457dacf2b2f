"""Tests of ``service.api.reads``."""
