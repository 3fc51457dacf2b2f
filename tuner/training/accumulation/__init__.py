"""Make one exact optimizer update of any number of micro-batches, on any number of ranks.

``engine`` runs forward and backward passes, recovers from a lack of memory, reduces over ranks, clips, and steps once.
``gradient_sums`` holds the sums of a window, in place or in scratch gradients; ``own_parameters`` says which parameters
are summed; ``collectives`` is what the ranks exchange between micro-batches.

A new strategy of summing is a subclass in ``gradient_sums``. Code that can fail on one rank alone must run inside the
ranks' collective call, or the other ranks wait for ever.
"""
