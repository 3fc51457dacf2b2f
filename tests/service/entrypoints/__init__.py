"""Tests of ``service.entrypoints``."""
