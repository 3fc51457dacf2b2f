"""Batchwright's library: find the largest micro-batch that fits and plan an exact effective batch around it.

The modules directly in this package are pure and never import torch; ``workloads``, ``memory``, ``probing`` and
``training`` do the work on a device.
"""
