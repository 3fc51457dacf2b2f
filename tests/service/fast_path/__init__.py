"""Tests of ``service.fast_path``."""
