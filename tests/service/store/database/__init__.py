"""Tests of the database of the store."""
