"""Simulate torch's CUDA caching allocator. No torch.

``replay`` runs the events of a trace through ``simulator`` and reports peaks, retries, and the smallest sufficient
capacity. ``simulator`` splits, caches and merges blocks as torch does; ``config`` defines the settings and the rounding
rules.

A new setting of `PYTORCH_CUDA_ALLOC_CONF` goes to ``config``, and its effect on blocks to ``simulator``.
"""
