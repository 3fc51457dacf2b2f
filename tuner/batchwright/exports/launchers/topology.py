"""Shared parts of launchers: topology, program and environment, torchrun's arguments, and valid names.

One process runs per device, so the world size is the number of processes; nodes all have the same number of them.
torchrun never restarts (`--max-restarts=0`): in trials it recovered a killed rank in 3 of 6 runs, and a fresh start
from the checkpoint, by the scheduler, in 6 of 6.
"""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from batchwright.errors import EstimateError, ExportError
from batchwright.exports.base import ExportContext, ExportedFile, Warnings
from batchwright.exports.launchers.carried_command import CarriedCommand, carried_command, ranks_of_one_node
from batchwright.exports.rendering import checked_environment, plan_variables, program_path
from batchwright.exports.spec_advice import nodes
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.schemas.gpus import Gpu

PORT = 29500
"""Port of the rendezvous: torchrun's own default."""
STANDALONE: tuple[str, ...] = ("--standalone",)
"""Rendezvous arguments of torchrun on one node."""

_SCRATCH = "/tmp/batchwright"  # noqa: S108 - in the container of a job, which nobody else uses
_NAME = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
_LONGEST_NAME = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 40
_QUEUE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Launch:
    """The processes of a job and their topology."""

    name: str
    """Name of the job, valid for the target."""
    nodes: int
    """Number of hosts."""
    processes_per_node: int
    """Processes, and devices, per host."""
    environment: Mapping[str, str]
    """Environment variables of every process."""
    program: tuple[str, ...]
    """The script and its arguments."""
    device_name: str
    """Name of the measured device."""
    on_gpu: bool
    """True if a process needs a GPU."""
    gpu: Gpu | None
    """The card, if it is in the catalogue."""
    command: CarriedCommand | None = None
    """The command that starts all ranks itself; none where torchrun starts the program."""

    @property
    def amd(self) -> bool:
        """True for a GPU of AMD."""
        if self.gpu is not None:
            return self.gpu.vendor == "amd"
        return re.search(r"\b(amd|instinct|radeon)\b", self.device_name, re.IGNORECASE) is not None

    @property
    def mig(self) -> str | None:
        """The size of the slice, for example `1g.10gb`, where the device is a slice of a card."""
        found = re.search(r"\bMIG (\d+g\.\d+gb)", self.device_name)
        return found[1] if found else None


def launch_of(context: ExportContext, *, kubernetes: bool = False, has_folder: bool = True) -> Launch:
    """Build the launch of an export.

    Args:
        context: the export.
        kubernetes: whether the names are those of Kubernetes, whose pods have no folder of the export either.
        has_folder: whether the job starts in the folder of the export's files.

    Raises:
        ExportError: when the job's name is not valid for the target, or the nodes cannot have equally many processes.
    """
    options, recommendation, gpu = context.options, context.recommendation, None
    device = recommendation.device
    if device.traits.is_gpu:
        with suppress(EstimateError):  # a card that is not in the catalogue
            gpu = find_gpu(device.name)
    name = _job_name(options.job_name, kubernetes=kubernetes)
    in_folder = has_folder and not kubernetes
    command = carried_command(context, None if in_folder else f"{_SCRATCH}-{name}")
    named = options.arguments_of is not None
    if command is None:
        hosts, per_node = nodes(context)
        program = (program_path(options.script), *context.arguments)
        environment = dict(checked_environment(recommendation.environment)) if named else plan_variables(context)
    else:
        hosts, per_node = 1, ranks_of_one_node(context)
        program = command.argv if in_folder else command.alone()
        environment = dict(checked_environment(command.environment))
    return Launch(
        name=name,
        nodes=hosts,
        processes_per_node=per_node,
        environment=environment,
        program=program,
        command=command,
        device_name=device.name,
        on_gpu=device.traits.is_gpu,
        gpu=gpu,
    )


def torchrun(launch: Launch, rendezvous: tuple[str, ...]) -> tuple[str, ...]:
    """Command that starts one node's processes, up to the program; ``rendezvous`` has the rendezvous arguments."""
    topology = (f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.processes_per_node}")
    return ("torchrun", *topology, "--max-restarts=0", *rendezvous)


def starter(launch: Launch, rendezvous: tuple[str, ...] = STANDALONE) -> tuple[str, ...]:
    """The words before the program: torchrun's, or none where the program is a command that starts its ranks."""
    return () if launch.command is not None else torchrun(launch, rendezvous)


def torchrun_on_one_node(launch: Launch) -> tuple[str, ...]:
    """The whole command, program included, for a job of one node."""
    return (*starter(launch), *launch.program)


def script_files(launch: Launch, script: ExportedFile) -> tuple[ExportedFile, ...]:
    """A script, and the configuration files of a command beside it."""
    return (script, *(launch.command.exported_files(script.name) if launch.command else ()))


def folder_line(launch: Launch) -> str:
    """The line of a script that makes the output folder of a command; empty without one."""
    return "" if launch.command is None else launch.command.folder_line()


def required_files(launch: Launch) -> str:
    """Describe what must be there for the program to start."""
    return launch.program[0] if launch.command is None else "the programs and files of the command"


def output_in_container(launch: Launch) -> Warnings:
    """Warn that a container's own folder ends with it."""
    folder = None if launch.command is None else launch.command.output_directory
    message = f"`{{output_dir}}` of the command is {folder}, which is lost with its machine: mount a volume there."
    return {} if folder is None else {"output-folder": message}


def c10d(endpoint: str, *, job: str, is_host: str | None = None) -> tuple[str, ...]:
    """Rendezvous arguments for several nodes, in which a shell may expand variables.

    Args:
        endpoint: host and port of the first node.
        job: identifier of this start of the job.
        is_host: `true` on the first node and `false` elsewhere; torchrun detects the first node when left out.
    """
    words = ("--rdzv-backend=c10d", f'--rdzv-endpoint="{endpoint}"', f'--rdzv-id="{job}"')
    settings = "join_timeout=1800,read_timeout=600"
    return (*words, f'--rdzv-conf="{settings}"' if is_host is None else f'--rdzv-conf="{settings},is_host={is_host}"')


def command_lines(words: tuple[str, ...], program: tuple[str, ...] = (), *more: str, before: str = "") -> str:
    """One command over several lines of a shell script. The shell expands ``more``, but not ``program``."""
    return before + " \\\n  ".join([*words, *map(shlex.quote, program), *more]) + "\n"


def without_queue(context: ExportContext, title: str) -> None:
    """Refuse a queue where the target has none."""
    if context.options.queue is not None:
        raise ExportError("wrong-option", f"{title} has no queues: leave `queue` out (it is {context.options.queue!r})")


def queue_label(context: ExportContext) -> str | None:
    """The name of Kueue's local queue, if one was given that is valid in Kubernetes."""
    queue = context.options.queue
    if queue is not None and (len(queue) > _LONGEST_NAME or not _QUEUE.fullmatch(queue)):
        raise ExportError(
            "wrong-option",
            f"queue {queue!r} cannot name a queue in Kubernetes: it takes lower-case letters, digits, `-` and `.`, at "
            f"most {_LONGEST_NAME} of them",
        )
    return queue


def same_device(launch: Launch) -> Warnings:
    """Warn that the measurement holds for the measured device."""
    return {
        "same-device": f"The figures were measured on {launch.device_name}: on a device with less memory the run may "
        "not fit. Ask the scheduler for that device, or tune again on the one it gives.",
    }


def same_versions(context: ExportContext, where: str) -> Warnings:
    """Warn that the job needs the versions of the probes."""
    versions = ", ".join(f"{name} {version}" for name, version in context.recommendation.versions.items())
    return {
        "same-versions": f"{where} must hold what the probes ran with{f' ({versions})' if versions else ''}: memory "
        "differs between versions. Pin them, or tune again there.",
    }


def restart_resumes(how: str) -> Warnings:
    """Warn that a restarted program has to resume from its own checkpoint."""
    return {
        "restart-resumes": f"{how} runs the program again from its start: it has to resume from its own checkpoint, as "
        "Batchwright's engine does.",
    }


def slices(launch: Launch) -> Warnings:
    """Warn of the limits of slices of a card."""
    found: Warnings = {}
    if launch.mig is not None:
        several = " NCCL does not join slices of one card: give each process a card of its own, or use one process."
        found["mig-device"] = (
            f"The plan was measured on a slice of a card ({launch.mig}): request such slices from the "
            f"scheduler.{several if launch.nodes * launch.processes_per_node > 1 else ''}"
        )
    return found


def _job_name(name: str, *, kubernetes: bool) -> str:
    """Check the name of the job, and propose one that is valid everywhere."""
    valid, longest = (_LABEL, _LONGEST_LABEL) if kubernetes else (_NAME, _LONGEST_NAME)
    rule = (
        "cannot name a job in Kubernetes: it takes lower-case letters, digits and `-`, a letter first and no `-` last"
        if kubernetes
        else "cannot be used: it takes letters and digits, with single `.`, `_` or `-` between them"
    )
    if len(name) > longest or not valid.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:_LONGEST_LABEL].strip("-")
        proposal = f"; {near!r} is valid" if near else ""
        raise ExportError("wrong-option", f"job_name {name!r} {rule}, at most {longest} characters{proposal}")
    return name
