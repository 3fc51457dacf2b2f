"""Run a tuning: one loop for every caller, from the checks before the first probe to the what-ifs after the last.

``loop`` drives a session (``planning.session``), which names the steps, with a runner, which runs them
(``probe_runner`` has its interface). What a caller does at the steps, such as showing or recording them, is its hooks.

- ``activities`` says what a tuning does now, in the same words for every caller.
- ``foreground`` is the caller of the command line and the library: a tuning on a device of this host.
- ``virtual_estimate`` is the engine `virtual` of estimates: a search on virtual cards.
- The workers of the service are the third caller.

Where a new thing goes: a step of every tuning, ``planning.steps``; what only one caller does, its hooks; a way to run
probes, a ``ProbeRunner`` in a package of its own.

The package may import every package of ``batchwright`` but ``cli``, ``library``, ``client`` and ``integrations``. It
never imports torch: the service imports it.
"""
