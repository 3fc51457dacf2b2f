"""Probe a command that nobody changed: run it at a size, count its updates from inside, and end it.

The pipeline of a probe of a command:

1. ``templates`` replaces the placeholders of the spec by the figures of the probe, and writes the configuration files.
2. ``command_supervisor`` receives the request from the caller that drives the tuning. ``launching`` starts the command
   in a fresh process, or ``fork_servers`` has a process of the command forked that has executed the program's imports.
   ``command_probe`` follows this run to its end. In both cases a subreaper (``batchwright.system.subreaper``) is above
   the command, and ends every process of its tree.
3. ``injected`` is loaded into every Python process of the tree. It sets the memory limit, counts backward passes,
   samples and optimizer steps, observes every OOM, and reports to files.
4. ``reports`` reads those files. ``counted_updates`` compares the counted figures with the plan's, and ``outcomes``
   turns the end of the command into the result of the probe, each with its evidence. ``stacks`` reads where a command
   that is too slow hangs.

A job of a command takes the same way without an end: ``command_job`` starts it by ``launching``, ``injected.watching``
counts and sets no limit, ``job_progress`` reads the figures, and ``job_outcomes`` turns the end into a result.
``environment`` builds the variables of both.

Where a new thing goes: a figure that is counted, ``injected.counting`` and ``reports``; a rule on the figures,
``counted_updates``; a way for a command to start, ``launching``, or to end, ``outcomes``; a placeholder,
``batchwright.schemas.command`` and ``templates``.

The package may import ``planning``, ``hardware``, ``schemas`` and ``system``; never torch. ``injected`` imports only
the standard library and torch, because it runs in the interpreter of the command.
"""
