"""The command ``batchwright health``.

The command line imports this module also where the service's packages are not installed.
"""

import sys

import typer


def health() -> None:
    """Check the service's processes that this user runs on this machine, or in this container, and print one line each.

    For a container's health check: an API must respond to /livez on its own address, and a worker must have reported
    within 30 seconds. Exit code 1 when one does not, or when none runs.
    """
    from batchwright_service.entrypoints.liveness import check_alive  # noqa: PLC0415 - see the module's docstring
    from batchwright_service.errors import ServiceError  # noqa: PLC0415 - see the module's docstring

    try:
        for line in check_alive():
            sys.stdout.write(line + "\n")
    except ServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(1) from None
