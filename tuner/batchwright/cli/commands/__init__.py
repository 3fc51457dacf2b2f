"""The commands of `batchwright`, one module each: parse, call one function, print, pick an exit code.

A new command is a function here and a line in ``batchwright.cli.main``. The commands of another distribution, such as
those that serve, are found through the entry-point group `batchwright.commands`.
"""
