"""Tests of ``service.auth``."""
