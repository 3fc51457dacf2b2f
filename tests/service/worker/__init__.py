"""Tests of ``service.worker``."""
