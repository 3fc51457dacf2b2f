"""Exact gradient accumulation: the engine, the loop around it, its checkpoints, and the process that runs it.

Importing this package does not import torch; its modules ``engine``, ``loop``, ``data`` and ``worker`` do.
"""
