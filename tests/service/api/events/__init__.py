"""Tests of ``service.api.events``."""
