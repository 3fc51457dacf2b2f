"""SkyPilot: a task."""

import shlex

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.launchers.pod_spec import Fields, cpu_memory_bytes, image
from batchwright.exports.launchers.topology import (
    PORT,
    Launch,
    c10d,
    command_lines,
    folder_line,
    launch_of,
    queue_label,
    restart_resumes,
    same_versions,
    script_files,
    slices,
    starter,
    torchrun,
)
from batchwright.exports.rendering import yaml_file
from batchwright.hardware.gpu_table import SKYPILOT_NAMES

_FIRST_NODE = """\
head_node=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then first=true; else first=false; fi
"""


def _write(context: ExportContext) -> TargetOutput:
    launch = launch_of(context)
    task = yaml_file("task.yaml", context, _task(context, launch))
    return TargetOutput(script_files(launch, task), ("sky", "launch", "task.yaml"), _warnings(context, launch))


def _task(context: ExportContext, launch: Launch) -> dict[str, JsonValue]:
    queue = queue_label(context)
    environment: Fields = dict(launch.environment)
    task: Fields = {
        "name": launch.name,
        "num_nodes": launch.nodes,
        "workdir": ".",
        "resources": _resources(context, launch),
        "envs": environment,
        "run": _run(launch),
    }
    if queue is not None:
        task["config"] = {"kubernetes": {"kueue": {"local_queue_name": queue}}}
    return task


def _resources(context: ExportContext, launch: Launch) -> Fields:
    fields: Fields = {} if context.options.queue is None else {"infra": "kubernetes"}
    fields["image_id"] = f"docker:{image(context)}"
    if launch.on_gpu:
        return fields | {"accelerators": f"{_accelerator(context, launch)}:{launch.processes_per_node}"}
    gigabytes = -(-cpu_memory_bytes(context, launch) // 1024**3)
    return fields | {"cpus": f"{launch.processes_per_node}+", "memory": f"{gigabytes}+"}


def _accelerator(context: ExportContext, launch: Launch) -> str:
    """SkyPilot's name of the card; where it has none, at least as much memory."""
    if launch.gpu is not None and launch.gpu.name in SKYPILOT_NAMES:
        return SKYPILOT_NAMES[launch.gpu.name]
    return f"{-(-context.recommendation.device.total_bytes // 1024**3)}GB+"


def _run(launch: Launch) -> str:
    if launch.nodes == 1:
        return folder_line(launch) + command_lines(starter(launch), launch.program)
    rendezvous = c10d(f"$head_node:{PORT}", job=shlex.quote(launch.name), is_host="$first")
    return _FIRST_NODE + command_lines(torchrun(launch, rendezvous), launch.program)


def _warnings(context: ExportContext, launch: Launch) -> Warnings:
    found = same_versions(context, f"The image {context.options.image}")
    if launch.on_gpu:
        found["same-device"] = (
            f"The figures were measured on {launch.device_name}; {_accelerator(context, launch)} is requested. "
            "SkyPilot's name may mean several variants of a card: on one with less memory the run may not fit."
        )
    else:
        found["host-resources"] = (
            "A CPU and the measured memory are requested for each process: add what your data loading takes."
        )
    return found | restart_resumes("A managed job (`sky jobs launch`) that lost its machines") | slices(launch)


TARGET = Target(
    name="skypilot",
    title="SkyPilot task",
    kind="launcher",
    versions=("0.14",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node", "queue", "image"}),
    write=_write,
    checked="read by SkyPilot's own parser; its command run by torchrun on the CPU",
)
