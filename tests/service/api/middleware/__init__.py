"""Tests of ``service.api.middleware``."""
