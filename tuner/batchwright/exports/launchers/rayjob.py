"""KubeRay: a RayJob, which creates a cluster, runs the job and deletes the cluster."""

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.launchers.pod_spec import RESTARTS, Fields, container, image, manifest, pod, pod_warnings
from batchwright.exports.launchers.ray_common import (
    entrypoint,
    entrypoint_resources,
    ray_warnings,
    runtime_environment,
)
from batchwright.exports.launchers.topology import Launch, launch_of, restart_resumes, slices
from batchwright.exports.rendering import yaml_file, yaml_text

_KEEP_SECONDS = 600
"""Seconds that a finished job's cluster is kept, so that its log can be read."""


def _write(context: ExportContext) -> TargetOutput:
    launch = launch_of(context, kubernetes=True)
    message = (
        f"The image {context.options.image} also runs Ray's own processes: it needs `ray[default]` and `wget` beside "
        "torch."
    )
    warnings = {"image-has-ray": message} | pod_warnings(context, launch)
    warnings |= restart_resumes("A failed job's next try, in a new cluster,") | ray_warnings(launch) | slices(launch)
    document = manifest(context, launch, ("ray.io/v1", "RayJob"), _spec(context, launch))
    files = (yaml_file("rayjob.yaml", context, document),)
    return TargetOutput(files, ("kubectl", "create", "-f", "rayjob.yaml"), warnings)


def _spec(context: ExportContext, launch: Launch) -> Fields:
    """The job's `spec`. `HTTPMode` passes the entrypoint unchanged; the default mode pastes it into a command."""
    return {
        "submissionMode": "HTTPMode",
        "entrypoint": entrypoint(launch),
        **entrypoint_resources(launch, cpus="entrypointNumCpus", gpus="entrypointNumGpus"),
        "runtimeEnvYAML": yaml_text(runtime_environment(launch)),
        "metadata": {"batchwright_recommendation": context.recommendation.id},
        "backoffLimit": RESTARTS,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
        "rayClusterSpec": {"headGroupSpec": _head(context), "workerGroupSpecs": [_workers(context, launch)]},
    }


def _head(context: ExportContext) -> Fields:
    """The head node: with no CPU to offer, it runs only Ray's own processes."""
    head: Fields = {
        "name": "ray-head",
        "image": image(context),
        "resources": {"requests": {"cpu": "1", "memory": "4Gi"}},
    }
    return {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": {"containers": [head]}}}


def _workers(context: ExportContext, launch: Launch) -> Fields:
    """The worker nodes, with explicit numbers of CPUs and GPUs, since a pod need not declare its CPUs."""
    parameters: Fields = {"num-cpus": str(launch.processes_per_node)}
    if launch.on_gpu:
        parameters["num-gpus"] = str(launch.processes_per_node)
    return {
        "groupName": "trainers",
        "replicas": launch.nodes,
        "minReplicas": launch.nodes,
        "maxReplicas": launch.nodes,
        "rayStartParams": parameters,
        "template": {"spec": pod(launch, container(context, launch, "ray-worker"))},
    }


TARGET = Target(
    name="rayjob",
    title="KubeRay RayJob",
    kind="launcher",
    versions=("1.4",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node", "queue", "image"}),
    write=_write,
    checked="pods read by models of Kubernetes' published schema, the rest by one recorded from KubeRay's sources",
)
