"""torchrun: a script for one node, or to be started on each of several."""

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.launchers.topology import (
    PORT,
    STANDALONE,
    Launch,
    c10d,
    command_lines,
    folder_line,
    launch_of,
    same_device,
    same_versions,
    script_files,
    slices,
    starter,
    without_queue,
)
from batchwright.exports.rendering import export_lines, origin, script_file, unset_line

_ASK = ': "${MASTER_ADDR:?set it to the name or address of the first node, the same on every node}"\n'


def _write(context: ExportContext) -> TargetOutput:
    without_queue(context, "torchrun")
    launch = launch_of(context)
    files = script_files(launch, script_file("launch.sh", _script(context, launch)))
    return TargetOutput(files, ("sh", "launch.sh"), _warnings(context, launch))


def _script(context: ExportContext, launch: Launch) -> str:
    before, rendezvous = folder_line(launch), STANDALONE
    if launch.nodes > 1:
        before, rendezvous = _ASK, c10d(f"$MASTER_ADDR:${{MASTER_PORT:-{PORT}}}", job=launch.name)
    command = command_lines(starter(launch, rendezvous), launch.program, '"$@"', before="exec ")
    return (
        f"#!/bin/sh\n{origin(context)}set -eu\n{unset_line(context)}{export_lines(launch.environment)}{before}{command}"
    )


def _warnings(context: ExportContext, launch: Launch) -> Warnings:
    found: Warnings = {}
    if launch.nodes > 1:
        found["start-on-each-node"] = (
            f"Start launch.sh on each of the {launch.nodes} nodes, with MASTER_ADDR (and MASTER_PORT, when {PORT} is "
            "taken) set to the same first node on all of them."
        )
    return found | same_device(launch) | same_versions(context, "The environment") | slices(launch)


TARGET = Target(
    name="torchrun",
    title="torchrun",
    kind="launcher",
    versions=("2",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node"}),
    write=_write,
    checked="run by torchrun on the CPU, on one node and two; the script checked by shellcheck",
)
