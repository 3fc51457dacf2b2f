"""Tests of ``service.client``."""
