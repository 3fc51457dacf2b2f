"""Tests that need a CUDA device: run by ``make gpu-test``."""
