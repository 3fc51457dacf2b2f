"""Commands that the operator has registered: the only programs that a service runs for its callers.

From the operator's file to a spec that is run:

1. ``definitions`` has the documents of the file (BATCHWRIGHT_COMMANDS): a command with its allowed arguments.
2. ``placement`` refuses a definition in which a caller's text could become an option, a program or the syntax of a
   configuration file.
3. ``argument_values`` checks the values of a caller against the allowed arguments, paths against the data roots.
4. ``registered_commands`` reads the file, lists the commands with the JSON Schema of ``argument_schema``, and turns a
   name with arguments into a ``CommandSpec``. Its placeholders are replaced when it is run, all in one pass.

Submissions and jobs resolve a name there, and workers compare the result with their own file before each probe and
job, so that a worker runs nothing that its own operator has not registered.

Where a new thing goes: a type of argument, a class in ``definitions``, its check in ``argument_values`` and its schema
in ``argument_schema``; a place where values may stand, ``placement``.

The package may import ``batchwright_service.domain``, ``batchwright_service.errors`` and ``batchwright``.
"""
