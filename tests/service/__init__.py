"""Tests of ``service``."""
