"""The command of a recommendation as an export carries it: with the plan's figures, and without placeholders.

The command starts in the folder of the export's files, so that they and the output folder have relative paths. In a
container or on a cluster that has no such folder, a shell writes the files first, and gives the command its place.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from batchwright.errors import ExportError
from batchwright.exports.base import ExportContext, ExportedFile, Warnings
from batchwright.exports.rendering import plan_variables
from batchwright.exports.spec_advice import LARGEST_NODE
from batchwright.schemas.command import OUTPUT_DIRECTORY, UPDATES
from batchwright.units import counted

_OUTPUT = "output"
_LONGEST_SCRIPT = 100_000
"""Bytes of the shell script that writes the files: Linux takes 131,072 in an argument."""


@dataclass(frozen=True)
class CarriedCommand:
    """A command without placeholders, and what has to be there before it starts."""

    argv: tuple[str, ...]
    """The command and its arguments."""
    environment: Mapping[str, str]
    """Its variables, beside those of the probes."""
    files: Mapping[str, str]
    """Texts of its configuration files by path."""
    output_directory: str | None
    """The folder that `{output_dir}` is; none where the command does not use it."""

    def exported_files(self, own: str) -> tuple[ExportedFile, ...]:
        """The configuration files as files of the export, beside its own.

        Raises:
            ExportError: when one of them has the name of the export's own file.
        """
        if own in self.files:
            raise ExportError(
                "not-expressible",
                f"the command's file {own!r} has the name of a file of this export: give the template another name",
            )
        return tuple(
            ExportedFile(name=name, media_type="text/plain", content=text) for name, text in self.files.items()
        )

    def folder_line(self) -> str:
        """The line of a shell script that makes the output folder; empty without one."""
        return "" if self.output_directory is None else f"mkdir -p {shlex.quote(self.output_directory)}\n"

    def alone(self) -> tuple[str, ...]:
        """The command for a place without the export's files: a shell writes them, and becomes the command.

        Raises:
            ExportError: when the files are too large for that.
        """
        folders = {path.rpartition("/")[0] for path in self.files} | {self.output_directory or ""}
        lines = [f"mkdir -p {shlex.quote(folder)}" for folder in sorted(folders - {""})]
        lines += [f"printf %s {shlex.quote(text)} > {shlex.quote(path)}" for path, text in self.files.items()]
        if not lines:
            return self.argv
        script = "\n".join(["set -e", *lines, 'exec "$@"'])
        if len(script.encode()) > _LONGEST_SCRIPT:
            raise ExportError(
                "not-expressible",
                f"the command's files have {sum(map(len, self.files.values())):,} characters, too many for a manifest: "
                "put them into the image, and name their paths in the command",
            )
        return ("/bin/sh", "-c", script, "sh", *self.argv)


def carried_command(context: ExportContext, folder: str | None) -> CarriedCommand | None:
    """The command of the recommendation; None if it is for a workload.

    ``folder`` is an absolute folder for its files, where the job has no folder of the export.

    Raises:
        ExportError: when the command asks for a number of updates that the options lack.
    """
    command = context.recommendation.request.command
    if command is None:
        return None
    model, plan, updates = command.model, context.plan, context.options.updates
    if updates is None and UPDATES in model.placeholders:
        raise ExportError("wrong-option", "the command has the placeholder `{updates}`: give their number in `updates`")
    prefix = "" if folder is None else f"{folder}/"
    sizes = (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.effective_batch_size, updates)
    filled = model.filled(sizes, prefix + _OUTPUT, {name: prefix + name for name in model.files})
    return CarriedCommand(
        argv=filled.argv,
        environment={**plan_variables(context), **filled.environment},
        files={prefix + name: text for name, text in filled.files.items()},
        output_directory=prefix + _OUTPUT if OUTPUT_DIRECTORY in model.placeholders else None,
    )


def ranks_of_one_node(context: ExportContext) -> int:
    """The processes that the command starts on its node.

    Raises:
        ExportError: when the options spread them over several nodes.
    """
    world, per_node = context.plan.world_size, context.options.processes_per_node
    if per_node is not None and per_node != world:
        raise ExportError(
            "wrong-option",
            f"the command starts its {counted(world, 'rank')} itself, on one node: leave `processes_per_node` "
            f"out (it is {per_node}). For several nodes, tune a spec of the workload, whose export starts the "
            "ranks",
        )
    return world


def command_advice(context: ExportContext) -> Warnings:
    """Say how the command of a recommendation is started; nothing where the recommendation is for a workload."""
    found: Warnings = {}
    command = context.recommendation.request.command
    if command is None:
        return found
    folder, ranks = command.model.working_directory, context.plan.world_size
    where = "the folder of its program" if folder == "." else folder
    starts = "one process" if ranks == 1 else f"its {ranks} ranks on one node"
    large = f" A node with {ranks} devices is requested." if ranks > LARGEST_NODE else ""
    found["command-as-tuned"] = (
        f"The job runs the tuned command with the figures of the plan. The command starts {starts} itself, so "
        f"this export adds no torchrun. Start it in {where}.{large}"
    )
    return found
