"""Tests of ``service.application``."""
