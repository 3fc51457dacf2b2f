"""Tests of causal language models."""
