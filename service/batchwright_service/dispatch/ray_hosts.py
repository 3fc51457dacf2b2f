"""Processes on several nodes of a Ray cluster, for one job: a placement group, and an actor for each process.

``gather`` is the entry point of the Ray job. It reserves the nodes, all or none, and runs the work on the first. The
work runs a command on another node through ``run_on``, a local process with the output and the end of the remote one.
Ray ends the actors of a process that ends, and the actors' processes end with them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchwright.system.processes import tied
from batchwright.training.launching.host_agents import HOSTS, LOST_HOST_STATUS, Hosts

_NAMESPACE = "batchwright"
_POLL_SECONDS = 0.2
_RESERVE_SECONDS = 5.0
"""Interval at which a stop is noticed while nodes are gathered."""
_OF_HOSTS = ("RAY_", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "BATCHWRIGHT_NODE_NAME", "BATCHWRIGHT_DATA_DIR")
"""Beginnings of the names of variables that belong to one node."""


class HostProcess:
    """A process on the node of an actor, with which it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return the address of the node."""
        return str(ray.util.get_node_ip_address())

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_JOB_CONFIG")}
        self._process = subprocess.Popen(tied(command), env={**own, **environment})  # noqa: S603 - see the module

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.terminate()


class _Stop:
    """Record of SIGTERM, which Ray's own handler would not pass on."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


@dataclass(frozen=True)
class Nodes:
    """Nodes of a placement group."""

    name: str
    """Name of the group."""
    count: int
    resources: dict[str, float]
    """Resources that are taken of each."""
    labels: dict[str, str] | None = None
    """Ray's selector of the nodes that have the hardware; None where all will do."""


def gather(nodes: Nodes, command: Sequence[str]) -> int:
    """Reserve nodes, run a command of ``batchwright`` on the first of them, and return its exit status."""
    with _joined(None) as stop:
        bundles = [nodes.resources] * nodes.count
        selectors = None if nodes.labels is None else [nodes.labels] * nodes.count
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=nodes.name, bundle_label_selector=selectors)
        while not group.wait(_RESERVE_SECONDS):
            if stop.requested:
                return 128 + signal.SIGTERM
        words = (sys.executable, "-m", "batchwright_service.dispatch.ray_hosts", "on", json.dumps(asdict(nodes)))
        address = ray.get_runtime_context().gcs_address
        others = tuple((*words, address, str(index)) for index in range(1, nodes.count))
        first = _actor(group, 0, nodes.resources)
        hosts = Hosts(address=ray.get(first.address.remote()), others=others)
        work = [sys.executable, "-m", "batchwright", *command]
        return _follow(first, work, {HOSTS: hosts.model_dump_json()}, stop)


def run_on(nodes: Nodes, address: str, index: int, command: Sequence[str]) -> int:
    """Run a command on a node of a placement group, and return its exit status; that of a lost host if it is gone."""
    carried = {key: value for key, value in os.environ.items() if not key.startswith(_OF_HOSTS)}
    for key in [key for key in os.environ if key.startswith("RAY_")]:
        del os.environ[key]  # of the actor that this process runs below
    try:
        with _joined(address) as stop:
            actor = _actor(ray.util.get_placement_group(nodes.name), index, nodes.resources)
            return _follow(actor, command, carried, stop)
    except (RayError, ValueError, ConnectionError) as error:  # a ValueError without the placement group
        print(f"host {index} is lost: {error}", file=sys.stderr)  # noqa: T201 - the run's log
        return LOST_HOST_STATUS


@contextmanager
def _joined(address: str | None) -> Iterator[_Stop]:
    """Join the cluster within the block."""
    ray.init(address=address, namespace=_NAMESPACE)
    try:
        yield _Stop()
    finally:
        ray.shutdown()


def _actor(group: PlacementGroup, index: int, resources: Mapping[str, float]) -> Any:  # noqa: ANN401 - Ray's handle
    custom = {name: amount for name, amount in resources.items() if name != "GPU"}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = {"num_cpus": 0, "num_gpus": resources.get("GPU", 0), "resources": custom, "max_restarts": 0}
    return ray.remote(HostProcess).options(**options, scheduling_strategy=strategy).remote()


def _follow(actor: Any, command: Sequence[str], environment: Mapping[str, str], stop: _Stop) -> int:  # noqa: ANN401
    """Run a command in an actor, pass SIGTERM on, and return the exit status."""
    ray.get(actor.start.remote(list(command), dict(environment)))
    is_told = False
    while (status := ray.get(actor.poll.remote())) is None:
        if stop.requested and not is_told:
            ray.get(actor.terminate.remote())
            is_told = True
        time.sleep(_POLL_SECONDS)
    return int(status) if status >= 0 else 128 - int(status)


def main(arguments: Sequence[str]) -> int:
    """Run ``gather NODES COMMAND...`` or ``on NODES ADDRESS INDEX COMMAND...``, and return the exit status."""
    use, text, *rest = arguments
    nodes = Nodes(**json.loads(text))
    return gather(nodes, rest) if use == "gather" else run_on(nodes, rest[0], int(rest[1]), rest[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
