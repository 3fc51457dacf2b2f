"""Shared parts of both exports to Ray: the entrypoint, the runtime environment and the reserved resources.

On one node the entrypoint is torchrun, and Ray starts it where its devices are free. On several nodes it is a
program that has Ray reserve the nodes and runs one torchrun on each. The program is an argument of `python -c`, so that
nothing has to be copied to the cluster.
"""

import json
import shlex

from batchwright.errors import ExportError
from batchwright.exports.base import Warnings
from batchwright.exports.launchers.pod_spec import Fields
from batchwright.exports.launchers.topology import Launch, torchrun, torchrun_on_one_node

_ON_EACH_NODE = """\
import json, socket, subprocess, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

nodes, share, words = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
torchrun, program = words[:words.index("--")], words[words.index("--") + 1:]

def rendezvous_endpoint():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]

def run(node, address, port):
    rendezvous = ["--node-rank=%d" % node, "--master-addr=" + address, "--master-port=%d" % port]
    return subprocess.run(torchrun + rendezvous + program).returncode

def at(function, node):
    place = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=node)
    needs = {"num_%ss" % name.lower(): number for name, number in share.items()}
    return ray.remote(function).options(scheduling_strategy=place, max_retries=0, **needs)

ray.init()
reserved = placement_group([share] * nodes, strategy="STRICT_SPREAD")
ray.get(reserved.ready())
address, port = ray.get(at(rendezvous_endpoint, 0).remote())
ends = ray.get([at(run, node).remote(node, address, port) for node in range(nodes)])
sys.exit(0 if not any(ends) else "torchrun ended with status %s on the nodes" % ends)
"""


def entrypoint(launch: Launch) -> str:
    """The command that Ray's job runs, for a shell."""
    if launch.nodes == 1:
        return shlex.join(torchrun_on_one_node(launch))
    words = (*torchrun(launch, ()), "--", *launch.program)
    return shlex.join(("python", "-c", _ON_EACH_NODE, str(launch.nodes), json.dumps(share(launch)), *words))


def share(launch: Launch) -> Fields:
    """Resources of one node's processes, with Ray's names."""
    per_node = launch.processes_per_node
    return {"CPU": per_node} | ({"GPU": per_node} if launch.on_gpu else {})


def entrypoint_resources(launch: Launch, *, cpus: str, gpus: str) -> Fields:
    """Resources of the entrypoint, by these names; none on several nodes, where it reserves them for its tasks."""
    names = {"CPU": cpus, "GPU": gpus}
    return {names[kind]: number for kind, number in share(launch).items()} if launch.nodes == 1 else {}


def runtime_environment(launch: Launch) -> Fields:
    """Ray's `runtime_env`.

    Raises:
        ExportError: when Ray would expand a part of a value.
    """
    for name, value in launch.environment.items():
        if "$" in value:
            raise ExportError(
                "wrong-environment",
                f"{name} is {value!r}, and Ray replaces `$NAME` in values of variables, with no way to prevent it: set "
                "the variable in the image of the cluster instead",
            )
    return {"env_vars": dict(launch.environment)}


def ray_warnings(launch: Launch) -> Warnings:
    """Warnings of every export to Ray."""
    found: Warnings = {}
    if launch.nodes > 1:
        found["whole-nodes"] = (
            f"{launch.nodes} different Ray nodes are reserved, each with {json.dumps(share(launch))}: the job waits "
            "until they are free."
        )
    return found
