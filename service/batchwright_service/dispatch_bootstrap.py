"""The composition root of dispatchers."""

import os
from dataclasses import replace
from pathlib import Path

from sqlalchemy import make_url

from batchwright.system.own_variables import PREFIX
from batchwright_service.dispatch.cluster_engine import Engine
from batchwright_service.dispatch.dispatcher import Dispatcher
from batchwright_service.errors import ConfigurationError
from batchwright_service.settings import Settings
from batchwright_service.worker_bootstrap import WorkerSystem, assemble_worker

_SHORTEST_PAUSE_SECONDS = 1.0
_OF_NODES = (
    "runs_dir",
    "lease_seconds",
    "poll_seconds",
    "fallback_poll_seconds",
    "shutdown_grace_seconds",
    "python_targets",
    "data_roots",
    "commands",
    "log_level",
    "log_format",
)
"""Settings that the workers on the nodes share with the service."""


def build_dispatcher(settings: Settings) -> WorkerSystem:
    """Build the dispatcher of the cluster that the settings name.

    Raises:
        ConfigurationError: when the settings are invalid, or the packages of the engine are not installed.
        StoreUnavailableError: when the database cannot be reached.
    """
    if settings.ray and settings.slurm:
        raise ConfigurationError("BATCHWRIGHT_RAY and BATCHWRIGHT_SLURM exclude each other: run a service for each")
    if not settings.url.startswith("postgresql"):
        raise ConfigurationError(
            "the nodes of a cluster need a store that all of them reach: BATCHWRIGHT_DATABASE_URL, a URL of PostgreSQL"
        )
    engine = _engine(settings)
    system = assemble_worker(settings, [], {})
    pause = max(_SHORTEST_PAUSE_SECONDS, settings.poll_seconds)
    return replace(system, coordinator=Dispatcher(system.store, engine, settings.lease_seconds, pause))


def environment_of_nodes(settings: Settings, *, is_public: bool) -> dict[str, str]:
    """Return the variables of the workers on the nodes.

    Args:
        settings: the settings of the service.
        is_public: the engine shows variables to others: a URL with a password is left out then, and the nodes need
            ``BATCHWRIGHT_DATABASE_URL`` in their own environment.
    """
    given = settings.model_dump(include=set(_OF_NODES), exclude_defaults=True)
    values = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in given.items()}
    values["runs_dir"] = str(settings.runs_dir)
    if not is_public or make_url(settings.url).password is None:
        values["database_url"] = settings.url
    return {f"{PREFIX}{name.upper()}": value for name, value in values.items() if value != "None"}


def _engine(settings: Settings) -> Engine:
    """Create the engine; each needs packages of an extra of its own."""
    extra = "ray" if settings.ray else "slurm"
    try:
        if settings.ray:
            from batchwright_service.dispatch.ray_engine import RayEngine  # noqa: PLC0415 - see above

            environment = environment_of_nodes(settings, is_public=True)
            return RayEngine(settings.ray, settings.node_command, environment)
        from batchwright_service.dispatch.slurm_engine import SlurmEngine  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error}: install batchwright[{extra}]") from None
    os.environ.update(environment_of_nodes(settings, is_public=False))  # sbatch hands its environment on
    return SlurmEngine(Path(settings.slurm or ""), settings.node_command)
