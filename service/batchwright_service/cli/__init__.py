"""Provide the commands of the service, such as `batchwright serve`, `work`, `keys`, `webhooks` and `prune`.

``batchwright.cli.main`` finds them through the entry-point group `batchwright.commands` of `pyproject.toml`, so that
``batchwright`` never imports ``batchwright_service``.

- ``serve`` parses the options of `serve` and `work` into ``batchwright_service.settings``, and calls
  ``batchwright_service.entrypoints``.
- ``health_check`` checks the processes of `serve` and `work`, for a container's health check.
- ``admin`` opens the database for `keys` and `prune`, and calls the use cases of ``batchwright_service.application``.
- ``webhooks`` does so for `webhooks`, ``stored_recommendations`` for `recommendations`.

Where a new thing goes: an option of `serve`, a setting in ``batchwright_service.settings`` and a parameter in
``serve``; a command on the database, ``admin``; a command of its own, also the entry point in `pyproject.toml`.

The package may import everything else in ``batchwright_service``. Errors of the service become errors of the command
line, for which ``batchwright.cli.main`` picks the exit code.
"""
