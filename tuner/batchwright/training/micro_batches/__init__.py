"""Divide micro-batches, move them to a device, and undo a failed pass over one.

``splitting`` divides a micro-batch into smaller ones, for the structures that ``nested_batches`` supports.
``loss_window`` adds up losses and weights. ``snapshot`` and ``rng_state`` capture and restore buffers and random
numbers around a pass, and ``batch_versions`` detects a loss that writes to its batch.
"""
