"""Kubeflow Trainer v2: a TrainJob for the runtime `torch-distributed`, which is there after its installation."""

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.launchers.pod_spec import (
    MEMORY_MOUNTS,
    MEMORY_VOLUMES,
    Fields,
    image,
    literal,
    manifest,
    placement,
    pod_warnings,
    resources,
    variables,
)
from batchwright.exports.launchers.topology import Launch, launch_of, slices
from batchwright.exports.rendering import yaml_file

_PATCHES_SINCE = "2.3"
_NODE = "node"
"""The runtime's name of its job and of the container in the job."""
_UNPATCHED = {
    "runtime-lacks": f"Each release before {_PATCHES_SINCE} named pod overrides differently, so this manifest has no "
    "memory volume for `/dev/shm` and no nodeSelector: put them into the training runtime, or load data without "
    "worker processes."
}
_RESTARTS = {
    "restarts": "The training runtime decides how often a failed job restarts (`backoffLimit`, `failurePolicy` of its "
    "JobSet). The program must then resume from its own checkpoint, as Batchwright's engine does."
}


def _write(context: ExportContext) -> TargetOutput:
    launch = launch_of(context, kubernetes=True)
    patched = context.version == _PATCHES_SINCE
    warnings = pod_warnings(context, launch, placed=patched) | ({} if patched else _UNPATCHED)
    warnings |= _RESTARTS | slices(launch)
    spec: Fields = {"runtimeRef": {"name": "torch-distributed"}, "trainer": _trainer(context, launch)}
    if patched:
        mount = {"name": _NODE, "volumeMounts": MEMORY_MOUNTS}
        pod = {**placement(launch), "containers": [mount], "volumes": MEMORY_VOLUMES}
        job = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
        spec["runtimePatches"] = [
            {"manager": "batchwright", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ]
    document = manifest(context, launch, ("trainer.kubeflow.org/v1alpha1", "TrainJob"), spec)
    files = (yaml_file("trainjob.yaml", context, document),)
    return TargetOutput(files, ("kubectl", "create", "-f", "trainjob.yaml"), warnings)


def _trainer(context: ExportContext, launch: Launch) -> Fields:
    """The `trainer`. The operator passes the rendezvous in `PET_*`; the number of processes is an explicit argument."""
    options = (f"--nproc-per-node={launch.processes_per_node}", "--max-restarts=0")
    command, *words = launch.program if launch.command is not None else ("torchrun", *options, *launch.program)
    return {
        "image": image(context),
        "numNodes": launch.nodes,
        "numProcPerNode": launch.processes_per_node,
        "command": [literal(command)],
        "args": [literal(word) for word in words],
        "env": variables(launch),
        "resourcesPerNode": resources(context, launch),
    }


TARGET = Target(
    name="trainjob",
    title="Kubeflow TrainJob",
    kind="launcher",
    versions=("2.3", "2.0"),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node", "queue", "image"}),
    write=_write,
    checked="2.3 read by models of its published schema, its command run by torchrun; 2.0 by no release of its own",
)
