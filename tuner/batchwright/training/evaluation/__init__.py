"""Evaluate the weights of a run on samples that do not train.

``held_out_data`` divides the data of a run, or reads held-out files. ``evaluator`` runs forward passes over them
without gradients, under the memory limit of the run, and halves a batch that does not fit; ``evaluation_sums`` adds up
the figures. ``run_evaluation`` decides after which updates to evaluate, which weights are the best, and whether the run
ends early.

An evaluation leaves no trace in the training: random numbers and the modes of modules are restored, and buffers, but
for those of a model that ranks share, which evaluation mode leaves as they are in torch's own modules. A new
metric is a name in ``batchwright.schemas.dataset.evaluation_spec``, and its figures are computed in
``evaluation_sums``.
"""
