"""Handle one micro-batch: cut it, move it, run it again as if it had never run.

``splitting`` divides a micro-batch into smaller ones, over the structures that ``nested_batches`` understands.
``loss_window`` adds up losses and weights. ``snapshot`` and ``rng_state`` capture and restore buffers and random
numbers around a pass, and ``batch_versions`` notices a loss that writes to its batch.
"""
