"""Tests of the project: its README, examples, import rules and what is installed."""
