"""Entry point of the command: child processes are started before the slow imports, which take a second.

Only the standard library and the modules that start processes are imported here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from batchwright.early_processes import EarlyProcesses, option_values
from batchwright.estimation.worker_start import tracing_worker
from batchwright.probing.fork_server_start import fork_server

_CARDS = Path("/proc/driver/nvidia/gpus")
"""A folder of NVIDIA's driver, with one entry per card."""
_HELP = {"--help", "-h"}
_SEPARATOR = "--"
"""The word before a training command."""
_INTERRUPTED = 130
"""``ExitCode.INTERRUPTED``, which is imported with the rest."""


def main() -> None:
    """Run the command ``batchwright``."""
    early = EarlyProcesses()
    start_processes(sys.argv[1:], early)
    try:
        gc.disable()  # garbage collection takes a quarter of the time of the imports
        try:
            from batchwright.cli.main import main as run  # noqa: PLC0415 - only now
        finally:
            gc.enable()
        run(early)
    except KeyboardInterrupt:  # during an import; ``run`` handles later ones
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)
    finally:
        early.close()


def start_processes(arguments: Sequence[str], early: EarlyProcesses) -> None:
    """Start the child process that the command is likely to need.

    After a wrong guess, the child process is ended when another one is started, or when the command ends.

    Args:
        arguments: arguments of the command line, without the program's name.
        early: owner of the child process.
    """
    command, *options = arguments or ("",)
    place = options.index(_SEPARATOR) if _SEPARATOR in options else None
    own = options[:place]
    if _HELP & set(own):
        return
    if command == "estimate" and "virtual" not in option_values(own, "--engine"):
        early.children.prestart(tracing_worker())
    elif command in {"tune", "run"}:
        is_for_card = _has_cards() and "cpu" not in option_values(own, "--device")
        if place is None:
            early.children.prestart(fork_server("cuda" if is_for_card else "cpu"))
        elif not is_for_card:  # on a card, the first probe depends on the cards that are there
            early.start_command_server(own, options[place + 1 :])


def _has_cards() -> bool:
    return _CARDS.is_dir() and any(_CARDS.iterdir())
