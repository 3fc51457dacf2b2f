"""The settings of a service: environment variables with the prefix ``BATCHWRIGHT_``, or options of a command.

An option has precedence over a variable, and a variable over the default. A variable with the prefix that nothing reads
is an error: a misspelt setting must not be ignored.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tuner.errors import FieldProblem, SpecError
from tuner.schemas.field_errors import described_pattern, problems_in
from tuner.suggestions import suggestion

PREFIX = "BATCHWRIGHT_"
OTHER_VARIABLES = frozenset(
    {
        "BATCHWRIGHT_API_KEY",  # the SDK's
        "BATCHWRIGHT_URL",  # of the examples
        "BATCHWRIGHT_RENDEZVOUS",  # between the ranks of a run
        "BATCHWRIGHT_RUN_DATA_ROOTS",  # of a run that a worker starts
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE",  # a plan's figures, in exported jobs
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS",
        "BATCHWRIGHT_MICRO_BATCH_SIZE",
        "BATCHWRIGHT_MICRO_BATCH_SIZES",
        "BATCHWRIGHT_PLAN_SOURCE",
        "BATCHWRIGHT_WORLD_SIZE",
    }
)
"""Variables with the prefix that are no settings."""
_OTHERS = re.compile(
    r"BATCHWRIGHT_(TEST_\w*|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables of the tests, and those that Kubernetes sets in pods beside a service whose name begins with
`batchwright`."""
_OPTIONS = {"devices": "--device", "worker": "--no-worker"}
"""Options that are not named as their settings."""

_NODE_NAME = described_pattern(
    r"^[^/\s\x00-\x1f]{1,200}$", "must have 1 to 200 characters, none of them a slash, a space or a control character"
)
DEFAULT_DATA_DIR = Path("~/.local/share/batchwright")

_Names = Annotated[tuple[str, ...], NoDecode]
"""Several names: separated by commas in an environment variable, or a JSON list."""


class Settings(BaseSettings):
    """The settings of one service. Nothing else reads the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    data_dir: Path = DEFAULT_DATA_DIR
    """Folder of everything the service writes: the embedded database, the runs, the lock files."""
    runs_dir: Path = Field(default_factory=lambda known: known["data_dir"] / "runs")
    """Folder of the jobs' runs, one folder per job; `runs` in the data folder when absent. Each host has its own, or
    all share one: then a job whose host is lost goes on from its checkpoint on another, else from its beginning."""
    database_url: str | None = None
    """SQLAlchemy URL; the embedded SQLite file `batchwright.db` in the data folder when absent."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback only once there are API keys (`batchwright keys create`)."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: _Names = ("localhost", "127.0.0.1", "::1")
    """Names under which the service may be addressed (without port): others are DNS rebinding, and refused."""
    worker: bool = True
    """Whether the process that serves the API also serves devices. Without, workers run apart (`batchwright work`)."""
    devices: _Names = ()
    """Devices to serve, for example `cuda:0,cuda:1`; every device of the host when empty."""
    python_targets: _Names = ()
    """`python` workloads that may run, each as exactly `package.module:factory`. They run as this service's user."""
    data_roots: _Names = ()
    """Folders that jobs may read their data from."""
    node_name: Annotated[str, Field(pattern=_NODE_NAME)] = Field(default_factory=socket.gethostname)
    """Name of this host in the database, unlike every other's: together with a device it says what runs where."""
    lease_seconds: Annotated[float, Field(ge=1.0, le=3600.0)] = 15.0
    """A worker not heard of for this long loses what it runs to another. The same for every process of a service."""
    poll_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 0.5
    """How often a worker looks for work and for cancellations."""
    shutdown_grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 30.0
    """Time a running job gets to write a checkpoint when the service stops."""
    estimate_slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Estimates made at once; each keeps a processor busy for seconds, and may take gigabytes of host memory."""
    max_queued_per_key: Annotated[int, Field(ge=1)] | None = 100
    """Tunings and jobs that one API key may have waiting; more are refused with 429."""
    max_device_seconds_per_key: Annotated[float, Field(gt=0.0)] | None = None
    """Device seconds within `quota_window_seconds` after which an API key can submit no more; what runs goes on."""
    quota_window_seconds: Annotated[float, Field(ge=1.0, le=366 * 86_400.0)] = 86_400.0
    """How long a tuning or job counts to its key's device seconds after it has ended."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1024**2
    """Larger request bodies are refused unread."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    """Connections to the API at once; fewer where the limit of open files leaves no room for as many. When all are
    taken, those whose requests are not there yet make room for new ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged, on standard error."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object per line."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port on which this process serves its metrics without a key, besides `/metrics` of the API; 0 takes a free
    one."""
    metrics_host: str = "127.0.0.1"
    """Address that the metrics port listens on."""
    ready_queue_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """`/readyz` fails when work has waited this long for a device that stands idle or that no live worker serves. Work
    that waits behind other work, however long, is no fault."""

    @field_validator("allowed_hosts", "devices", "python_targets", "data_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("port", mode="before")
    @classmethod
    def _is_no_service_link(cls, value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "is the address that Kubernetes gives pods beside a service named `batchwright`: set "
                "`enableServiceLinks: false` in the pod, or give --port"
            )
        return value

    @field_validator("data_dir", "runs_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @property
    def url(self) -> str:
        """The database's URL, the default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir / 'batchwright.db'}"

    @property
    def locks_dir(self) -> Path:
        """Folder of the lock files, one per device."""
        return self.data_dir / "locks"

    @property
    def listens_on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_settings(**options: Any) -> Settings:  # noqa: ANN401 - values of settings
    """The settings of a command: its options, else the environment, else the defaults.

    Args:
        options: by the names of settings; none for an option that was not given.

    Raises:
        SpecError: naming every option and variable at fault.
    """
    given = {name: value for name, value in options.items() if value is not None}
    problems = unknown_variables(os.environ)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        problems += [_named_by_its_source(problem, given) for problem in problems_in(error, kind=Settings)]
    if problems:
        raise SpecError(problems, "settings")
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[FieldProblem]:
    """Variables with the prefix that nothing reads, each with the most similar setting. Their values may be secret."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    names = (name for name in environment if name.upper().startswith(PREFIX))
    strange = [it for it in names if it.upper() not in known | OTHER_VARIABLES and not _OTHERS.fullmatch(it.upper())]
    return [
        FieldProblem(name, f"is not a setting{suggestion(name, known) or ': service/settings.py lists them'}")
        for name in sorted(strange)
    ]


def _named_by_its_source(problem: FieldProblem, options: Mapping[str, object]) -> FieldProblem:
    """The problem of a setting, with the option or variable that set it in place of the field."""
    name = problem.field.partition(".")[0]
    option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
    return FieldProblem(option if name in options else PREFIX + name.upper(), problem.message, problem.value)
