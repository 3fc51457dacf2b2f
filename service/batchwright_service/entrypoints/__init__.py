"""Run the processes of the service.

- ``serve`` is `batchwright serve`: it builds the service, listens within the bounds of ``connections``, and runs until
  a signal (``signals``).
- ``hosted_worker`` is the child process in which `serve` runs the workers of its host, started by
  ``batchwright_service.worker.hosting``, whose memory and descriptors API clients cannot use up.
- ``work`` is `batchwright work`: the workers of a host without an API.
- ``liveness`` records that a process is alive, for `batchwright health`.

The first three follow one pipeline: take the settings, build with ``batchwright_service.bootstrap`` (workers alone with
``batchwright_service.worker_bootstrap``), configure logging, start, wait for a stop request, hand back running work,
close. A second signal to `serve` or `work` forces the shutdown.

Where a new thing goes: another process, a module here and a command in ``batchwright_service.cli``; a bound on the
connections of clients, ``connections``; an object that processes need, ``batchwright_service.bootstrap`` or
``batchwright_service.worker_bootstrap``.

The package may import everything in ``batchwright_service`` but ``cli``.
"""
