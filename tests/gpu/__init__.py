"""Tests that need a CUDA device: run by ``make gpu-test``."""

import os

RECOVERIES = 10 if "VIRTUAL_GPU_SESSION" in os.environ else 50
"""Out-of-memory errors in a row that may leave nothing. A virtual card computes on the CPU, with no driver to leak."""
