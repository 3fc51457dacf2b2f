"""Write the batch sizes of a recommendation for training frameworks, one module each.

Each module has a `TARGET` (``batchwright.exports.base.Target``), which ``batchwright.exports.registry`` lists. A
framework takes micro-batch size, accumulation steps, precision and clipping; it may also have `arguments`, which are
these values for its command line, passed on by launchers. `checked` states how the export is verified.
"""
