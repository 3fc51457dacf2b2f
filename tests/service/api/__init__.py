"""Tests of ``service.api``."""
