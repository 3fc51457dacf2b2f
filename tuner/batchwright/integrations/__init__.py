"""Callbacks that make the trainers of other libraries follow a recommendation.

``hugging_face`` has a callback of transformers' Trainer, ``lightning`` two of Lightning's Trainer: one refuses a run
that contradicts a recommendation, the other finds the micro-batch of a LightningModule before its fit. All measure with
``memory_peaks`` and log the peaks against the limit. ``measured`` compares a model and its optimizer with those that
were probed.

Each module imports its library, so importing this package imports none. The arguments of a trainer that make a plan are
written in ``batchwright.exports.frameworks`` and nowhere else: a callback reads the export, and compares. The callback
of another trainer is a module here, with tests in tests/integrations.
"""
