"""Compute the small operators of a virtual card on the CPU, so that losses and gradients of small models are right.

Memory of a virtual card is memory of the process, and its kernels do nothing. ``registration`` puts a function before
each of torch's CUDA kernels: the real one runs first (its checks, allocations and launches), and then the CPU's kernel
writes the values, on tensors that share the card's memory (``aliases``), if no tensor exceeds the session's limit.
``kernels`` is such a function. ``substitutes`` lists operators that the CPU lacks or defines otherwise, which
``attention``, ``normalization`` and ``recurrent`` compute; ``random_numbers`` draws from the state of the card's
generators. Operators that are left out are reported in ``virtual_gpu.uncomputed``.

Modules may import torch, unlike the rest of ``batchwright.virtual_gpu``, and are imported by ``system.startup``
alone.
"""
