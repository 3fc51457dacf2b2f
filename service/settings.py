"""What an operator can set: environment variables with the prefix ``BATCHWRIGHT_``, or keyword arguments."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

DEFAULT_DATA_DIR = Path("~/.local/share/batchwright")

_Names = Annotated[tuple[str, ...], NoDecode]
"""Several names: separated by commas in an environment variable, or a JSON list."""


class Settings(BaseSettings):
    """The settings of one service. Nothing else reads the environment."""

    model_config = SettingsConfigDict(
        env_prefix="BATCHWRIGHT_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

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
    node_name: Annotated[str, Field(pattern=r"^[^/\s\x00-\x1f]{1,200}$")] = Field(default_factory=socket.gethostname)
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
