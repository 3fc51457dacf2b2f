"""Tests of ``service.webhooks``."""
