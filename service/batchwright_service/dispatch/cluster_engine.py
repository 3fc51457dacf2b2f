"""The interface of an engine, which queues, places and runs jobs on the nodes of a cluster."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from batchwright.device_traits import DeviceKind
from batchwright_service.errors import ServiceError

_NAME = re.compile(r"batchwright-(?P<key>.+)-(?P<generation>\d+)-(?P<attempt>\d+)")


class EngineError(ServiceError):
    """The engine cannot be reached, or refuses a call. Never reaches HTTP: ``/v1/fleet`` shows its message."""

    code = "engine-unreachable"


class JobState(StrEnum):
    """The state of an engine's job."""

    PENDING = "PENDING"
    """Waits for a node."""
    RUNNING = "RUNNING"
    """Runs on a node."""
    ENDED = "ENDED"
    """Has ended in any way."""


@dataclass(frozen=True)
class JobName:
    """Name of a job: equal names are the same attempt, so that two dispatchers cannot submit it twice."""

    key: str
    """The work, or the node, that the job is for."""
    generation: int
    """The fencing token of the work when the job was submitted: a job of an earlier one has had its lease."""
    attempt: int
    """Number of jobs of the same generation before."""

    def __str__(self) -> str:
        return f"batchwright-{self.key}-{self.generation}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> JobName | None:
        """Return the name in a text, or None when the job is not of a dispatcher."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(found["key"], int(found["generation"]), int(found["attempt"]))


@dataclass(frozen=True)
class NewJob:
    """A job to submit."""

    name: JobName
    arguments: tuple[str, ...]
    """Arguments of ``batchwright`` on the node."""
    kind: DeviceKind
    devices: int
    """Number of devices of the kind that it takes, on each node; 0 for a job that runs beside others."""
    nodes: frozenset[str]
    """Ids of the nodes that have the hardware; ``hosts`` of them run the job."""
    hosts: int = 1
    """Number of nodes that it takes, all or none. The job runs on one of them, and reaches the others."""


@dataclass(frozen=True)
class EngineJob:
    """A job as its engine lists it."""

    id: str
    """The engine's own id."""
    name: JobName
    state: JobState
    message: str = ""
    """The engine's message: why the job waits, or how it ended."""
    nodes: frozenset[str] | None = None
    """Ids of the nodes to which it was restricted when it was submitted; None without a restriction."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    id: str
    """The engine's id, which a node that comes back may change."""
    name: str
    state: str
    """The engine's word."""
    alive: bool
    """True where jobs can run."""
    kinds: tuple[DeviceKind, ...] = ()
    """The kinds of devices that the engine hands out there."""


class Engine(ABC):
    """A cluster's engine. Every method raises EngineError when the cluster cannot be reached or refuses."""

    name: str
    """Short name, also the prefix of the owners of its devices."""
    address: str
    """Address of the cluster, for people."""

    @abstractmethod
    def submit(self, job: NewJob) -> None:
        """Submit a job. One whose name is taken is not submitted again, where the engine knows names."""

    @abstractmethod
    def jobs(self) -> list[EngineJob]:
        """Return the jobs of dispatchers, ended ones included as long as the engine knows them."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """Stop a job by force: its processes are killed if they do not end. Ended and unknown jobs are ignored."""

    @abstractmethod
    def forget(self, job_id: str) -> None:
        """Delete what the engine keeps of an ended job. Unknown jobs are ignored."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Return the nodes, dead ones included as long as the engine lists them."""
