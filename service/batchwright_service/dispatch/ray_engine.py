"""Ray as the engine, through the HTTP API of its jobs: this process never joins the cluster.

A job takes one unit of ``batchwright_cpu``, a custom resource of nodes whose CPU is to be tuned on, or GPUs. Ray sets
``CUDA_VISIBLE_DEVICES``, and scales the cluster when jobs wait.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes
from typing_extensions import override

from batchwright.device_traits import DeviceKind, traits_of
from batchwright_service.dispatch.cluster_engine import (
    Engine,
    EngineError,
    EngineJob,
    JobName,
    JobState,
    NewJob,
    Node,
)

CPU_RESOURCE = "batchwright_cpu"
"""Custom resource: the CPU of a node as a device, of which there is one."""
_NODES = "nodes"
"""Key of a job's metadata: the ids of the nodes to which its selector restricts it."""
_STATES = {JobStatus.PENDING: JobState.PENDING, JobStatus.RUNNING: JobState.RUNNING}
_MOST_NODES = 10_000
"""Ray's own limit of a list."""
_SECONDS = 30

_T = TypeVar("_T")


class RayEngine(Engine):
    """A Ray cluster.

    Ray shows the variables of jobs (``environment``) to everyone who can reach the dashboard.
    """

    name = "ray"

    def __init__(self, address: str, command: str, environment: Mapping[str, str]) -> None:
        self.address = address
        self._command = command
        self._environment = dict(environment)
        self._client: JobSubmissionClient | None = None
        self._kinds: dict[str, tuple[DeviceKind, ...]] = {}

    @override
    def submit(self, job: NewJob) -> None:
        if any(known.name == job.name for known in self.jobs()):  # by another dispatcher; Ray refuses a second one
            return
        self._call(
            lambda client: client.submit_job(
                entrypoint=f"{self._command} {shlex.join(self._arguments(job))}",
                submission_id=str(job.name),
                runtime_env={"env_vars": self._environment},
                metadata=None if self._selector(job) is None else {_NODES: ",".join(sorted(job.nodes))},
                entrypoint_num_cpus=0,
                **self._placement(job),
            )
        )

    def _placement(self, job: NewJob) -> dict[str, Any]:
        """Return what the entry point takes; one that gathers nodes takes nothing itself."""
        if job.hosts > 1:
            return {}
        return {
            "entrypoint_num_gpus": job.devices if traits_of(job.kind).is_gpu else 0,
            "entrypoint_resources": None if traits_of(job.kind).is_gpu or not job.devices else {CPU_RESOURCE: 1},
            "entrypoint_label_selector": self._selector(job),
        }

    def _arguments(self, job: NewJob) -> tuple[str, ...]:
        """Return the arguments of the entry point, which gathers several nodes before the work starts on one."""
        if job.hosts == 1:
            return job.arguments
        resources = {"GPU": job.devices} if traits_of(job.kind).is_gpu else {CPU_RESOURCE: 1}
        nodes = {"name": str(job.name), "count": job.hosts, "resources": resources, "labels": self._selector(job)}
        return ("node", "gather", json.dumps(nodes), "--", *job.arguments)

    def _selector(self, job: NewJob) -> dict[str, str] | None:
        """Return the nodes by name, unless all of that kind will do: then new nodes of the autoscaler will too."""
        same = {node for node, kinds in self._kinds.items() if job.kind in kinds}
        if job.devices and same <= job.nodes:
            return None
        return {"ray.io/node-id": f"in({','.join(sorted(job.nodes))})"}

    @override
    def jobs(self) -> list[EngineJob]:
        jobs = []
        for found in self._call(lambda client: client.list_jobs()):
            name = JobName.parse(found.submission_id or "")
            if name is not None:
                state = _STATES.get(found.status, JobState.ENDED)
                named = (found.metadata or {}).get(_NODES)
                nodes = None if named is None else frozenset(named.split(","))
                jobs.append(EngineJob(found.submission_id, name, state, found.message or "", nodes))
        return jobs

    @override
    def stop(self, job_id: str) -> None:
        """Ray sends SIGTERM, and SIGKILL three seconds later."""
        self._call(lambda client: client.stop_job(job_id))

    @override
    def forget(self, job_id: str) -> None:
        self._call(lambda client: client.delete_job(job_id))

    @override
    def nodes(self) -> list[Node]:
        found = self._call(lambda _: list_nodes(self.address, limit=_MOST_NODES, timeout=_SECONDS, detail=True))
        nodes = [_node(item) for item in found]
        self._kinds = {node.id: node.kinds for node in nodes if node.alive}
        return nodes

    def _call(self, call: Callable[[JobSubmissionClient], _T]) -> _T:
        """Call Ray, over a new connection after each error."""
        try:
            if self._client is None:
                self._client = JobSubmissionClient(self.address)
            return call(self._client)
        except Exception as error:
            self._client = None
            lines = str(error).strip().splitlines()  # Ray's server sends its traceback in the message
            raise EngineError(f"Ray at {self.address}: {lines[0] if lines else type(error).__name__}") from error


def _node(found: Any) -> Node:  # noqa: ANN401 - Ray's record of a node
    resources = found.resources_total or {}
    names: tuple[tuple[str, DeviceKind], ...] = (("GPU", "cuda"), (CPU_RESOURCE, "cpu"))
    kinds = tuple(kind for resource, kind in names if resources.get(resource, 0) >= 1)
    return Node(found.node_id, found.node_name or found.node_ip, found.state, found.state == "ALIVE", kinds)
