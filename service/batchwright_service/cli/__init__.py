"""Provide the commands of the service, such as `batchwright serve`, `work`, `tunings`, `jobs` and `admin`.

``batchwright.cli.main`` finds them through the entry-point group `batchwright.commands` of `pyproject.toml`, so that
``batchwright`` never imports ``batchwright_service``.

- ``serve`` parses the options of `serve` and `work` into ``batchwright_service.settings``, and calls
  ``batchwright_service.entrypoints``.
- ``health_check`` checks the processes of `serve` and `work`, for a container's health check.
- ``administration`` is the group `admin` of the commands on the database: ``admin`` opens it for `keys` and `prune`,
  and calls the use cases of ``batchwright_service.application``; ``webhooks`` does so for `webhooks`, and
  ``stored_recommendations`` for `recommendations`.
- ``remote_tunings``, ``remote_jobs`` and ``remote_recommendations`` call a service over HTTP, with the SDK
  (``remote``).
- ``node`` has the commands that a cluster's engine starts on its nodes.

Where a new thing goes: an option of `serve`, a setting in ``batchwright_service.settings`` and a parameter in
``serve``; a command on the database, ``administration``; one over HTTP, the module of its resource; a command of its
own, also the entry point in `pyproject.toml`.

The package may import everything else in ``batchwright_service``. Errors of the service become errors of the command
line, for which ``batchwright.cli.main`` picks the exit code.
"""
