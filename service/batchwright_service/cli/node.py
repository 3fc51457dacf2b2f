"""The commands of ``batchwright node``, which a cluster's engine starts on its nodes.

The command line imports this module also where the service's packages are not installed.
"""

import os
import sys
from typing import Annotated

import typer

from batchwright.cli.help import GroupHelp
from batchwright_service.cli.serve import reading_settings

node = typer.Typer(
    cls=GroupHelp, no_args_is_help=True, help="Started by a dispatcher on the nodes of a Ray or Slurm cluster."
)


@node.command()
def run(work_id: Annotated[str, typer.Argument(help="Identifier of the tuning or job.")]) -> None:
    """Run one tuning or job on the device that the engine has assigned, and end."""
    with reading_settings({}) as settings:
        from batchwright_service.entrypoints.node_jobs import run_work  # noqa: PLC0415 - see the module's docstring

        run_work(settings, work_id)


@node.command(context_settings={"ignore_unknown_options": True})
def gather(
    nodes: Annotated[str, typer.Argument(help="The nodes of a Ray cluster to reserve, as JSON.")],
    command: Annotated[list[str], typer.Argument(help="Arguments of `batchwright`, to run on the first of them.")],
) -> None:
    """Reserve nodes of a Ray cluster, all or none, run a command on the first of them, and end with its status."""
    hosts = [sys.executable, "-m", "batchwright_service.dispatch.ray_hosts"]
    os.execv(sys.executable, [*hosts, "gather", nodes, *command])  # noqa: S606 - the only process with Ray


@node.command()
def announce(
    owner: Annotated[str, typer.Argument(help="Name of this node in the dispatcher.")],
    kinds: Annotated[list[str], typer.Argument(help="Kinds of devices to announce: `cpu`, `cuda`.")],
) -> None:
    """Announce the devices of this node, with the installed versions."""
    with reading_settings({}) as settings:
        from batchwright_service.entrypoints.node_jobs import announce as announce_devices  # noqa: PLC0415 - see the module's docstring

        announce_devices(settings, owner, kinds)
