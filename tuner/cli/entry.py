"""Where the command begins: what it will need is started before the rest of it is imported, which takes a second.

Only the standard library is imported here, and what starts processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tuner.estimation.worker_start import tracing_worker
from tuner.probing.fork_server_start import fork_server
from tuner.system.fork_server.spawn import Prestarted

_CARDS = Path("/proc/driver/nvidia/gpus")
"""A folder of NVIDIA's driver, with one entry per card."""
_HELP = {"--help", "-h"}
_INTERRUPTED = 130
"""``ExitCode.INTERRUPTED``, which is imported with the rest."""


def main() -> None:
    """The command ``batchwright``."""
    prestarted = Prestarted()
    begin(sys.argv[1:], prestarted)
    try:
        from tuner.cli.main import main as run  # noqa: PLC0415 - only now

        run(prestarted.take)
    except KeyboardInterrupt:  # during an import: later ones are the command's
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)
    finally:
        prestarted.close()


def begin(arguments: Sequence[str], prestarted: Prestarted) -> None:
    """Prestart the process that does a command's work, as far as the arguments tell which it is.

    A wrong guess costs a process that is ended when the right one is started, or the command itself ends.

    Args:
        arguments: of the command line, without its name.
        prestarted: starts and holds the process.
    """
    command, *options = arguments or ("",)
    if _HELP & set(options):
        return
    if command == "estimate":
        prestarted.prestart(tracing_worker())
    elif command in {"tune", "run"}:
        prestarted.prestart(fork_server("cuda" if _has_cards() and _device(options) != "cpu" else "cpu"))


def _device(options: Sequence[str]) -> str | None:
    """What ``--device`` says, in either of its two notations."""
    for option, following in zip(options, [*options[1:], None], strict=True):
        name, separator, value = option.partition("=")
        if name == "--device":
            return value if separator else following
    return None


def _has_cards() -> bool:
    return _CARDS.is_dir() and any(_CARDS.iterdir())
