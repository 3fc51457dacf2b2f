"""Shared parts of Kubernetes manifests: environment, resources, shared memory and node selection."""

import re
from typing import Any

from pydantic import JsonValue

from batchwright.errors import ExportError
from batchwright.exports.base import ExportContext, Warnings
from batchwright.exports.launchers.topology import Launch, output_in_container, queue_label, required_files

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label with which Kueue queues a job. The job has to be created suspended, and Kueue starts the job."""
RESTARTS = 3
"""Number of restarts of a failed job, each from its checkpoint."""
_SHARED_MEMORY = "shared-memory"

Fields = dict[str, Any]
"""A part of a manifest."""

MEMORY_VOLUMES: list[JsonValue] = [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
"""A pod's `volumes`: `/dev/shm`, of which containers have 64 MiB, which DataLoader workers soon fill."""
MEMORY_MOUNTS: list[JsonValue] = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]  # noqa: S108 - the container's own
"""A container's `volumeMounts` of the shared memory."""

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PROCESS_BYTES = 1024**3
"""Memory of a process beside what was measured: the interpreter, torch, and data loading."""


def manifest(context: ExportContext, launch: Launch, kind: tuple[str, str], spec: Fields) -> Fields:
    """A manifest of this API version and kind, queued by Kueue if the options name a queue."""
    queue = queue_label(context)
    metadata = {"name": launch.name, **({} if queue is None else {"labels": {_QUEUE_LABEL: queue}})}
    queued = {} if queue is None else {"suspend": True}
    return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, "spec": {**spec, **queued}}


def literal(text: str) -> str:
    """Escape `$`, since Kubernetes expands `$(NAME)` in commands, arguments and values of variables."""
    return text.replace("$", "$$")


def variables(launch: Launch) -> list[JsonValue]:
    """A container's `env`."""
    return [{"name": name, "value": literal(value)} for name, value in launch.environment.items()]


def container(context: ExportContext, launch: Launch, name: str, **more: JsonValue) -> Fields:
    """A container that trains."""
    return {
        "name": name,
        "image": image(context),
        **more,
        "env": variables(launch),
        "resources": resources(context, launch),
        "volumeMounts": MEMORY_MOUNTS,
    }


def image(context: ExportContext) -> str:
    """The container's image.

    Raises:
        ExportError: when the name contains white space.
    """
    name = context.options.image
    if re.search(r"\s", name):
        raise ExportError("wrong-option", f"image {name!r} cannot name an image: it contains white space")
    return name


def resources(context: ExportContext, launch: Launch) -> Fields:
    """Resources of a node: on the CPU the measured memory, on GPUs a device for each process.

    Limits are requests as well: some versions of the trainer's operator count processes by the requests alone.
    """
    if launch.on_gpu:
        devices: Fields = {gpu_resource(launch): str(launch.processes_per_node)}
        return {"requests": devices, "limits": dict(devices)}
    memory = -(-cpu_memory_bytes(context, launch) // 1024**2)
    return {"requests": {"cpu": str(launch.processes_per_node), "memory": f"{memory}Mi"}}


def cpu_memory_bytes(context: ExportContext, launch: Launch) -> int:
    """Memory of a node's processes on the CPU: a tenth above what was measured, and what torch itself takes."""
    headroom = context.recommendation.headroom
    peak = headroom.peak_bytes if headroom else 0
    return launch.processes_per_node * (peak + peak // 10 + _PROCESS_BYTES)


def gpu_resource(launch: Launch) -> str:
    """Name of the GPU resource in Kubernetes."""
    if launch.amd:
        return "amd.com/gpu"
    return f"nvidia.com/mig-{launch.mig}" if launch.mig else "nvidia.com/gpu"


def pod(launch: Launch, *containers: JsonValue, **more: JsonValue) -> Fields:
    """A pod's `spec`: containers, their shared memory, and the device that was measured."""
    return {**more, **placement(launch), "containers": list(containers), "volumes": MEMORY_VOLUMES}


def placement(launch: Launch) -> Fields:
    """A `nodeSelector` for the measured device, by the label that NVIDIA's feature discovery gives to nodes."""
    product = _product(launch)
    return {} if product is None else {"nodeSelector": {"nvidia.com/gpu.product": product}}


def pod_warnings(context: ExportContext, launch: Launch, *, placed: bool = True) -> Warnings:
    """Warnings of every manifest; ``placed`` is true if the manifest includes ``placement``."""
    found: Warnings = {}
    versions = ", ".join(f"{name} {version}" for name, version in context.recommendation.versions.items())
    measured = f" and what the probes ran with ({versions})" if versions else " and the versions the probes ran with"
    found["image"] = (
        f"The image {context.options.image} must have {required_files(launch)} in its working "
        f"directory{measured}: memory differs between versions."
    )
    found |= output_in_container(launch)
    if launch.on_gpu:
        remedy = "Choose nodes with that device by your nodes' labels."
        if placed and _product(launch) is not None:
            remedy = (
                "The nodeSelector requests that device by the label of NVIDIA's GPU feature discovery. If "
                "your nodes lack it, the job stays pending: use your own label."
            )
        found["same-device"] = f"The figures were measured on {launch.device_name}. {remedy}"
        requested = "Only GPUs are requested: add the CPUs and the memory that your data loading takes"
    else:
        requested = "A CPU and the measured memory are requested for each process: add what your data loading takes"
    found["host-resources"] = f"{requested}. `/dev/shm` counts as memory of the container."
    return found


def _product(launch: Launch) -> str | None:
    if not launch.on_gpu or launch.amd or launch.mig:
        return None
    product = "-".join(launch.device_name.split())
    return product if _LABEL_VALUE.fullmatch(product) else None
