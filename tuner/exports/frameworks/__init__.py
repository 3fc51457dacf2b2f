"""Write the batch figures of a recommendation for the frameworks that train, one module each.

Each module has a `TARGET` (``tuner.exports.base.Target``), which ``tuner.exports.registry`` lists. A framework takes
micro-batch size, accumulation steps, precision and clipping; it may also have `arguments`, the same figures for its
command line, which launchers pass on. A module says in `checked` how its export is known to be right.
"""
