"""Tests with torch's CUDA build on virtual cards (``make virtual-gpu-test``): nothing here is measured on a GPU."""
