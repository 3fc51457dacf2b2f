"""Tests of the dispatcher of clusters."""
