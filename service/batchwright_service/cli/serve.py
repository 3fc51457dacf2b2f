"""The commands ``batchwright serve`` and ``batchwright work``.

The command line imports this module also where the service's packages are not installed, so they are imported within
the functions that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchwright.errors import ServingError

if TYPE_CHECKING:
    from batchwright_service.settings import Settings

_LAST_PORT = 65_535

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="SQLAlchemy URL of the service's store. Default: BATCHWRIGHT_DATABASE_URL, else the SQLite file in "
        "the data folder."
    ),
]
_MetricsPort = Annotated[
    int | None,
    typer.Option(min=0, max=_LAST_PORT, help="Also serve metrics, without an API key, on this port of 127.0.0.1."),
]


def serve(  # noqa: PLR0913 - options of a command
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: BATCHWRIGHT_HOST, else 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_LAST_PORT,
            help="Port to listen on; 0 picks a free one. Default: BATCHWRIGHT_PORT, else 8000.",
        ),
    ] = None,
    database_url: DatabaseUrl = None,
    no_worker: Annotated[
        bool, typer.Option("--no-worker", help="Serve only the API; `batchwright work` serves the devices.")
    ] = False,
    metrics_port: _MetricsPort = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run the work on the Ray cluster with this dashboard address, such as `http://head:8265`."),
    ] = None,
    slurm: Annotated[
        Path | None,
        typer.Option(
            help="Run the work on the Slurm cluster of this host; the value is a folder that its nodes share."
        ),
    ] = None,
) -> None:
    """Serve the HTTP API, with a worker for each device of this host, or with a dispatcher to a cluster.

    Settings come from BATCHWRIGHT_* environment variables; the options here override them. SIGTERM stops it
    gracefully: jobs write a checkpoint, and running work is handed back. A second SIGTERM stops it at once.
    """
    given: dict[str, Any] = {"host": host, "port": port, "database_url": database_url, "metrics_port": metrics_port}
    given |= {"ray": ray, "slurm": slurm}
    with reading_settings(given | {"worker": False if no_worker else None}) as settings:
        from batchwright_service.entrypoints.serve import serve as run_server  # noqa: PLC0415 - see the module's docstring

        run_server(settings)


def work(
    *,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A device to serve, such as `cuda:0`. May be repeated. Default: all devices of this host."),
    ] = None,
    database_url: DatabaseUrl = None,
    metrics_port: _MetricsPort = None,
) -> None:
    """Serve devices of this host without an API: run the tunings and jobs that wait for them in the store.

    Settings come from BATCHWRIGHT_* environment variables, as for `serve`. Hosts that share a PostgreSQL store need a
    BATCHWRIGHT_NODE_NAME each (their host names, by default), and may share a BATCHWRIGHT_RUNS_DIR. SIGTERM stops it
    gracefully: jobs write a checkpoint, and running work is handed back. A second SIGTERM stops it at once.

    Example: batchwright work --database-url postgresql://user@host/batchwright --device cuda:0 --device cuda:1
    """
    given = {"devices": tuple(device) if device else None, "database_url": database_url, "metrics_port": metrics_port}
    with reading_settings(given) as settings:
        from batchwright_service.entrypoints.work import work as run_worker  # noqa: PLC0415 - see the module's docstring

        run_worker(settings)


@contextmanager
def reading_settings(given: dict[str, Any]) -> Iterator[Settings]:
    """Read the settings of a command, and translate errors of the service in the block.

    Raises:
        SpecError: when the settings are invalid.
        ServingError: when the service cannot be started.
    """
    from batchwright_service.errors import ServiceError  # noqa: PLC0415 - see the module's docstring
    from batchwright_service.settings import read_settings  # noqa: PLC0415 - see the module's docstring

    settings = read_settings(**given)
    try:
        yield settings
    except ServiceError as error:
        raise ServingError(str(error)) from None
