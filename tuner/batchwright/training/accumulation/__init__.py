"""Make one exact optimizer update of any number of micro-batches, on any number of ranks.

``engine`` runs forward and backward passes, clips, and steps once. ``recovery`` divides a micro-batch that ran out of
memory. ``gradient_sums`` sums the gradients of a window, in place or from scratch gradients, and ``reduction`` sums
them over ranks by the ``collectives``. ``trainable_parameters`` lists the parameters whose gradients are summed,
``gradient_noise`` measures a part of the window for the noise scale, ``sample_reader`` finds the samples of one's own
batches, and ``planned_window`` divides them into the micro-batches of a plan. ``measured_weights`` adds up the weights
of several loss terms.

A new way of summing is a subclass in ``gradient_sums``. Code that can fail on one rank alone must run in
``Ranks.run_collectively``, or the other ranks hang.
"""
