"""Tests of ``service.observability``."""
