"""Tests of registered commands."""
