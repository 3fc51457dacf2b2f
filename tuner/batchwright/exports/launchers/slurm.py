"""Slurm: a batch script for `sbatch`, with one task and one torchrun per node."""

import re

from batchwright.errors import ExportError
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.launchers.pod_spec import cpu_memory_bytes
from batchwright.exports.launchers.topology import (
    PORT,
    STANDALONE,
    Launch,
    c10d,
    command_lines,
    folder_line,
    launch_of,
    restart_resumes,
    same_device,
    same_versions,
    script_files,
    slices,
    starter,
)
from batchwright.exports.rendering import export_lines, one_line, origin, script_file, unset_line

_PARTITIONS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_CPUS_PER_PROCESS = 4
"""CPUs: one for the process and three for data loading. Without the option a node's processes share one CPU."""

_RENDEZVOUS = """\
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\\n'*}
"""


def _write(context: ExportContext) -> TargetOutput:
    launch = launch_of(context)
    files = script_files(launch, script_file("job.sbatch", _script(context, launch)))
    return TargetOutput(files, ("sbatch", "job.sbatch"), _warnings(context, launch))


def _script(context: ExportContext, launch: Launch) -> str:
    """The batch script. `--export=ALL` passes on its variables even where the site or the user submits with `NONE`."""
    before = _RENDEZVOUS if launch.nodes > 1 else folder_line(launch)
    words = ("srun", "--export=ALL", "--kill-on-bad-exit=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    command = command_lines((*words, *starter(launch, _rendezvous(launch))), launch.program, '"$@"', before="exec ")
    return (
        f"#!/bin/bash\n{_directives(context, launch)}{origin(context)}{_device_comment(launch)}set -euo pipefail\n"
        f"{unset_line(context)}{export_lines(launch.environment)}{before}{command}"
    )


def _directives(context: ExportContext, launch: Launch) -> str:
    queue = context.options.queue
    if queue is not None and not _PARTITIONS.fullmatch(queue):
        raise ExportError(
            "wrong-option",
            f"queue {queue!r} cannot name a Slurm partition: it takes letters, digits, `_`, `.` and `-`, and commas "
            "between several names",
        )
    options = {
        "job-name": launch.name,
        "partition": queue,
        "nodes": launch.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": _CPUS_PER_PROCESS * launch.processes_per_node,
        "gpus-per-node": launch.processes_per_node if launch.on_gpu else None,
        "mem": None if launch.on_gpu else f"{-(-cpu_memory_bytes(context, launch) // 1024**2)}M",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}\n" for name, value in options.items() if value is not None]
    return "".join(lines) + "#SBATCH --requeue\n"


def _device_comment(launch: Launch) -> str:
    if not launch.on_gpu:
        return ""
    name = one_line(launch.device_name)
    return f"# Measured on {name}: add its type, as this cluster calls it, to --gpus-per-node (type:count).\n"


def _rendezvous(launch: Launch) -> tuple[str, ...]:
    """Rendezvous arguments: restarts of a job differ in their name, and jobs that share a node in their port."""
    if launch.nodes == 1:
        return STANDALONE
    port = f"$(({PORT} + SLURM_JOB_ID % 1000))"
    return c10d(f"$head_node:{port}", job="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")


def _warnings(context: ExportContext, launch: Launch) -> Warnings:
    found = same_device(launch) | same_versions(context, "The environment on the nodes")
    found |= restart_resumes("`--requeue` (after a node's failure or a preemption)")
    measured = "memory is a tenth above what was measured, and 1 GiB per process"
    memory = "host memory is the partition's default" if launch.on_gpu else measured
    found["host-resources"] = (
        f"{_CPUS_PER_PROCESS} CPUs per process are requested, and {memory}: change `--cpus-per-task` and `--mem` to "
        "what your data loading takes."
    )
    if launch.command is not None and launch.processes_per_node > 1:
        found["one-task"] = (
            "The command is one Slurm task that starts its own ranks. Lightning reads Slurm's variables and "
            "rejects that: add the plugin `LightningEnvironment()` to its trainer."
        )
    return found | slices(launch)


TARGET = Target(
    name="slurm",
    title="Slurm batch script",
    kind="launcher",
    versions=("22.05",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node", "queue"}),
    write=_write,
    checked="run by a Slurm cluster of two nodes on the CPU; options read by sbatch, the script by shellcheck",
)
