"""KubeRay: a RayJob, which makes a cluster, runs the job in it, and takes it down."""

from __future__ import annotations

from pydantic import JsonValue

from tuner.exports.base import Order, Target, Written
from tuner.exports.launchers.pod_spec import QUEUE_LABEL, RESTARTS, Fields, container, image, pod, pod_warnings
from tuner.exports.launchers.ray_common import entrypoint, ray_warnings, reserved_by_entrypoint, runtime_environment
from tuner.exports.launchers.topology import Launch, launch_of, queue_label, restart_resumes, slices
from tuner.exports.rendering import yaml_file, yaml_text
from tuner.schemas.recommendation import Advice

_KEEP_SECONDS = 600
"""How long a finished job's cluster stays, so that its log can be read."""


def _write(order: Order) -> Written:
    launch = launch_of(order, kubernetes=True)
    warnings = (
        _image_has_ray(order),
        *pod_warnings(order, launch),
        restart_resumes("A failed job's next try, in a new cluster,"),
        *ray_warnings(launch),
        *slices(launch),
    )
    manifest = yaml_file("rayjob.yaml", order, _manifest(order, launch))
    return Written((manifest,), ("kubectl", "create", "-f", "rayjob.yaml"), warnings)


def _manifest(order: Order, launch: Launch) -> dict[str, JsonValue]:
    queue = queue_label(order)
    metadata: Fields = {"name": launch.name}
    spec = _spec(order, launch)
    if queue is not None:
        metadata["labels"] = {QUEUE_LABEL: queue}
        spec["suspend"] = True
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _spec(order: Order, launch: Launch) -> Fields:
    """`HTTPMode` hands the entrypoint over as it is; the default mode pastes it, and the variables, into a command."""
    reserved = reserved_by_entrypoint(launch)
    return {
        "submissionMode": "HTTPMode",
        "entrypoint": entrypoint(launch),
        **({"entrypointNumCpus": reserved["CPU"]} if "CPU" in reserved else {}),
        **({"entrypointNumGpus": reserved["GPU"]} if "GPU" in reserved else {}),
        "runtimeEnvYAML": yaml_text(runtime_environment(launch)),
        "metadata": {"batchwright_recommendation": order.recommendation.id},
        "backoffLimit": RESTARTS,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
        "rayClusterSpec": {"headGroupSpec": _head(order), "workerGroupSpecs": [_workers(order, launch)]},
    }


def _head(order: Order) -> Fields:
    """Runs Ray's own processes, and with no CPU to give away none of the job's."""
    head: Fields = {
        "name": "ray-head",
        "image": image(order),
        "resources": {"requests": {"cpu": "1", "memory": "4Gi"}},
    }
    return {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": {"containers": [head]}}}


def _workers(order: Order, launch: Launch) -> Fields:
    """What Ray may give away on a node is said in words, since a pod need not say how many CPUs it has."""
    parameters: Fields = {"num-cpus": str(launch.processes_per_node)}
    if launch.on_gpu:
        parameters["num-gpus"] = str(launch.processes_per_node)
    return {
        "groupName": "trainers",
        "replicas": launch.nodes,
        "minReplicas": launch.nodes,
        "maxReplicas": launch.nodes,
        "rayStartParams": parameters,
        "template": {"spec": pod(launch, container(order, launch, "ray-worker"))},
    }


def _image_has_ray(order: Order) -> Advice:
    return Advice(
        code="image-has-ray",
        message=f"The image {order.options.image} is that of Ray's own processes as well: it needs `ray[default]` and "
        "`wget` beside torch.",
    )


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
