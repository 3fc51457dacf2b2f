"""Divide micro-batches, move them to a device, and undo a failed pass over one.

``splitting`` divides a micro-batch into smaller ones, for the structures that ``nested_batches`` supports:
``sample_layout`` and ``sample_growth`` find where its samples are. ``loss_window`` adds up losses and weights.
``snapshot``, ``forward_state`` and ``rng_state`` capture and restore what a pass changes in the model and random
numbers, and detect a loss that writes to its batch.
"""
