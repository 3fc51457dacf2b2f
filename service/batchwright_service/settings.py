"""The settings of a service: environment variables with the prefix ``BATCHWRIGHT_``, or options of a command.

An option has precedence over a variable, and a variable over the default. An unknown variable with the prefix is an
error, so that a misspelt setting is not ignored.
"""

import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.field_errors import described_pattern, problems_in
from batchwright.suggestions import suggestion
from batchwright.system.own_variables import OTHER_VARIABLES, PREFIX, possible_settings

_API_KEY = "BATCHWRIGHT_API_KEY"
_OPTIONS = {"devices": "--device", "worker": "--no-worker"}
"""Options with other names than their settings."""

_NODE_NAME = described_pattern(
    r"^[^/\s\x00-\x1f]{1,200}$", "must have 1 to 200 characters, none of them a slash, a space or a control character"
)
DEFAULT_DATA_DIR = Path("~/.local/share/batchwright")

_Names = Annotated[tuple[str, ...], NoDecode]
"""Names: separated by commas in an environment variable, or a JSON list."""


class Settings(BaseSettings):
    """The settings of one service. Nothing else reads the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    data_dir: Path = DEFAULT_DATA_DIR
    """Folder of all files that the service writes: the embedded database, the runs, the lock files."""
    runs_dir: Path = Field(default_factory=lambda known: known["data_dir"] / "runs")
    """Folder of the jobs' runs, one folder per job. Default: `runs` in the data folder. With a folder
    that all hosts share, a job of a lost host resumes from its checkpoint on another host, else from its beginning."""
    database_url: str | None = None
    """SQLAlchemy URL. Default: the embedded SQLite file `batchwright.db` in the data folder."""
    host: str = "127.0.0.1"
    """Address to listen on. Addresses beyond loopback need an API key first (`batchwright admin keys create`)."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 selects a free one."""
    admin_key_file: Path | None = None
    """File with an API key that `serve` stores with the scope `admin` at its start, for a key from a secret store. Its
    text is `bw_`, 16 hexadecimal digits, `_` and 64 random hexadecimal digits. A revoked key stays revoked."""
    allowed_hosts: _Names = ("localhost", "127.0.0.1", "::1")
    """Allowed Host headers, without port. Others are refused, as a defence against DNS rebinding."""
    worker: bool = True
    """Serve the devices of this host too. When false, `batchwright work` serves devices."""
    devices: _Names = ()
    """Devices to serve, for example `cuda:0,cuda:1`; every device of the host when empty."""
    python_targets: _Names = ()
    """Allow-list of `python` workloads, each as `package.module:factory`. They run as the user of this service."""
    data_roots: _Names = ()
    """Folders from which jobs may read data."""
    hub_models: _Names = ()
    """Models of the Hugging Face hub that specs may name, as `openai-community/gpt2` or by patterns, as `team/*`. The
    API reads their configs, and jobs fetch their weights."""
    commands: Path | None = None
    """YAML file of the training commands that callers may tune and run. Default: none. Read at the start.
    Every process of workers needs the same file."""
    ray: str | None = None
    """Dashboard address of a Ray cluster, such as `http://head:8265`, whose nodes run the work instead of this host.
    They need the extra `ray`, a PostgreSQL store, and Batchwright on every node."""
    slurm: Path | None = None
    """Folder that the nodes of a Slurm cluster share, for the files of jobs that run the work instead of this host.
    They need the extra `slurm`, a PostgreSQL store, and Batchwright on every node. `SBATCH_PARTITION`, `SBATCH_ACCOUNT`
    and the other variables of sbatch apply."""
    node_command: str = "batchwright"
    """Command of Batchwright on the nodes of a cluster: a path in a shared folder, or one in a container."""
    node_name: Annotated[str, Field(pattern=_NODE_NAME)] = Field(
        default_factory=lambda: os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    )
    """Unique name of this host in the database: the host name, or in a job of Slurm that of its node. Host and device
    name a slot."""
    lease_seconds: Annotated[float, Field(ge=1.0, le=3600.0)] = 15.0
    """Lifetime of a lease: without heartbeats for this long, a worker loses its work. Equal for all processes."""
    poll_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 0.5
    """Interval at which a worker checks for work, and longest one of heartbeats, while no notifications of PostgreSQL
    arrive."""
    fallback_poll_seconds: Annotated[float, Field(ge=0.1, le=60.0)] = 5.0
    """Longest interval at which the workers of a process check for work and cancellations while notifications of
    PostgreSQL arrive: one may be lost. At least every quarter of a lease."""
    shutdown_grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 30.0
    """Time for a running job to write a checkpoint when the service stops."""
    estimate_slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Concurrent estimates; each uses a processor for seconds, and may take gigabytes of host memory."""
    max_queued_per_key: Annotated[int, Field(ge=1)] | None = 100
    """Waiting tunings and jobs per API key; more are refused with 429."""
    max_device_seconds_per_key: Annotated[float, Field(gt=0.0)] | None = None
    """Device-seconds per API key within `quota_window_seconds`; further submissions are refused."""
    quota_window_seconds: Annotated[float, Field(ge=1.0, le=366 * 86_400.0)] = 86_400.0
    """Time after its end for which a tuning or job counts towards the device-seconds of its key."""
    audit_retention_days: Annotated[float, Field(gt=0.0, le=36_500.0)] = 365.0
    """Days after which entries of the audit log are deleted. Every API process checks this at its start and hourly."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1024**2
    """Size limit of request bodies; larger ones are refused unread."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    """Concurrent connections to the API; fewer where the limit of open files requires it. When all are taken, new
    connections replace those whose requests have not arrived completely."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of log messages, which go to standard error."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text lines, or one JSON object per line."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port on which this process serves its metrics without an API key, besides `/metrics` of the API; 0 selects a
    free one."""
    webhook_hosts: _Names = ()
    """Hosts to which webhooks may go; no webhook is delivered when empty. An entry is `host`, `host:port` or
    `*.domain`, for https, or one of these after `http://`."""
    webhook_networks: _Names = ()
    """Networks with private addresses, such as `10.0.0.0/8`, to which webhooks may go too."""
    webhook_attempts: Annotated[int, Field(ge=1, le=20)] = 10
    """Attempts to deliver a message, after which it waits for an administrator."""
    webhook_first_pause_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 5.0
    """Pause after the first failed attempt; each further one is four times as long, up to six hours."""
    webhook_timeout_seconds: Annotated[float, Field(ge=0.1, le=60.0)] = 10.0
    """Longest time of an attempt."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics port."""
    ready_queue_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Time for which work may wait for an idle or unserved device before `/readyz` fails. Work that waits behind other
    work does not count."""

    @field_validator(
        "allowed_hosts",
        "devices",
        "python_targets",
        "data_roots",
        "hub_models",
        "webhook_hosts",
        "webhook_networks",
        mode="before",
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("port", mode="before")
    @classmethod
    def _refuse_service_link(cls, value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "is the address that Kubernetes gives pods beside a service named `batchwright`: set "
                "`enableServiceLinks: false` in the pod, or give --port"
            )
        return value

    @field_validator("data_dir", "runs_dir", "commands", "slurm")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @property
    def url(self) -> str:
        """URL of the database, or the default."""
        return self.database_url or f"sqlite:///{self.data_dir / 'batchwright.db'}"

    @property
    def locks_dir(self) -> Path:
        """Folder of the lock files, one per device."""
        return self.data_dir / "locks"

    @property
    def listens_on_loopback(self) -> bool:
        """Return whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_settings(**options: Any) -> Settings:  # noqa: ANN401 - values of settings
    """Read the settings of a command: its options, else the environment, else the defaults.

    Args:
        options: values by the names of settings; None for an option that was not given.

    Raises:
        SpecError: naming every invalid option and variable.
    """
    given = {name: value for name, value in options.items() if value is not None}
    problems = unknown_variables(os.environ)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        for problem in problems_in(error, kind=Settings):
            name = problem.field.partition(".")[0]
            source = PREFIX + name.upper()
            if name in given:
                source = _OPTIONS.get(name, "--" + name.replace("_", "-"))
            problems.append(FieldProblem(source, problem.message, problem.value))
    if problems:
        raise SpecError(problems, "settings")
    return settings


def withhold_variables() -> None:
    """Remove the settings and the SDK's key from the environment of this process, which has read its settings.

    Probes, jobs and estimates run code of others, and inherit the environment of their workers: the address of the
    database has its password. Other variables stay, since the operator may set them for that code.
    """
    withheld = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {_API_KEY}
    for name in [name for name in os.environ if name.upper() in withheld]:
        del os.environ[name]


def unknown_variables(environment: Mapping[str, str]) -> list[FieldProblem]:
    """Return the unknown variables with the prefix, with the most similar settings, without their values."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    unknown = [name for name in possible_settings(environment) if name.upper() not in known]
    names = known | OTHER_VARIABLES
    return [
        FieldProblem(
            name, f"is not a setting{suggestion(name, names) or ': service/batchwright_service/settings.py lists them'}"
        )
        for name in unknown
    ]
