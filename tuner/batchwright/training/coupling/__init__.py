"""Find losses that couple the samples of a batch (BatchNorm, in-batch negatives): no accumulation makes them exact.

``admission`` decides for a tuning or a run. ``check`` is the thorough check: ``comparison`` runs a batch and its parts
with equal ``random_draws`` from equal state, in the arithmetic of ``precision``, which also rounds weights;
``error_scale`` separates a difference from rounding. ``module_trace`` finds the module at fault, and ``report``
describes the result. ``loss_check`` is the cheap check for a user's own training loop.
"""
