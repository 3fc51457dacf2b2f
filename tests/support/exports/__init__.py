"""Shared parts of the tests of exports."""
