"""Provide the command line `batchwright`.

The pipeline of a command:

1. ``main`` is the installed script. It assembles the commands, and turns every error into a message and an exit code
   (``errors``).
2. A module of ``commands`` parses its options (``options``), from which ``arguments`` builds a validated request.
3. ``running`` drives a tuning or a training run in the foreground, which ``ending_signals`` end; the other commands
   call the library directly.
4. ``display`` and ``estimate_display`` draw tables and progress for a person. ``output`` prints the result on standard
   output, as a JSON document with `--json`.

Where to add:

- a command: a module of ``commands``, and a line in ``main``;
- an option of one command: a parameter in the command's module; one that several commands share: ``options``;
- the field behind an option: the request in ``batchwright.schemas.requests``; ``arguments`` lists the names that
  differ;
- an exit code: ``errors``.

This package may import everything else in ``batchwright``. It never imports torch, and slow imports are inside
functions, so that `batchwright --help` starts fast. Commands of another distribution, such as those of the service,
come from the entry-point group `batchwright.commands`.
"""
