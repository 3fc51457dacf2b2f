"""Child processes that are started before they are needed, while the rest of Batchwright is imported.

Only the standard library and the modules that start processes are imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.commands.environment import probe_environment
from batchwright.commands.fork_servers import ForkServer
from batchwright.commands.launching import find_in, may_serve
from batchwright.system.fork_server.spawn import Prestarted


@dataclass
class EarlyProcesses:
    """Processes that a tuning or an estimate may take, instead of starting its own.

    Attributes:
        children: processes of our own modules.
        command_server: the fork server of a command.
    """

    children: Prestarted = field(default_factory=Prestarted)
    command_server: ForkServer | None = None

    def start_command_server(self, options: Sequence[str], argv: Sequence[str]) -> None:
        """Start the fork server for a command's probes on the CPU, where it can have one.

        What is expected of the first probe may turn out wrong: the server is then started anew (``ForkServer.fork``).

        Args:
            options: the options of `batchwright tune` or `run`, before the command.
            argv: the command.
        """
        variables = dict(text.partition("=")[::2] for text in option_values(options, "--env"))
        if not argv or any("{" in text for text in (argv[0], *variables.values())):
            return
        folder = Path(next(option_values(options, "--working-directory"), ".")).absolute()
        program = find_in(folder, argv[0], {**os.environ, **variables})
        if program is None or not may_serve(program, argv):
            return
        with suppress(OSError):  # which the first probe meets again, and reports
            self.command_server = ForkServer(program)
            self.command_server.start(
                {
                    "argv": [*argv, *option_values(options, "--probe-argument")],
                    "working_directory": str(folder),
                    "environment": probe_environment(variables, "cpu", self.command_server.folder),
                    "fixes_addresses": True,
                }
            )

    def close(self) -> None:
        """End those that were not taken. Idempotent."""
        self.children.close()
        if self.command_server is not None:
            self.command_server.close()


def option_values(options: Sequence[str], requested: str) -> Iterator[str]:
    """The values of an option of a command line, which may be repeated, in either notation."""
    for number, option in enumerate(options):
        name, separator, value = option.partition("=")
        if name == requested and (separator or number + 1 < len(options)):
            yield value if separator else options[number + 1]
