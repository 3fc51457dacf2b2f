"""Peak memory without a device: updates traced on fake tensors, and an allocator that replays what they took.

Importing the package, ``trace``, ``allocator`` and ``replay`` needs no torch.
"""
