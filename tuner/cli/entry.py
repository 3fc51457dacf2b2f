"""Entry point of the command: the child process is prestarted before the slow imports, which take a second.

Only the standard library and the modules that start processes are imported here.
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
_COMMAND = "--"
"""The separator before a training command, for whose probes no process is prestarted."""
_INTERRUPTED = 130
"""``ExitCode.INTERRUPTED``, which is imported with the rest."""


def main() -> None:
    """Run the command ``batchwright``."""
    prestarted = Prestarted()
    prestart(sys.argv[1:], prestarted)
    try:
        from tuner.cli.main import main as run  # noqa: PLC0415 - only now

        run(prestarted.take)
    except KeyboardInterrupt:  # during an import; ``run`` handles later ones
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)
    finally:
        prestarted.close()


def prestart(arguments: Sequence[str], prestarted: Prestarted) -> None:
    """Prestart the child process that the command is likely to need.

    After a wrong guess, the child process is ended when another one is started, or when the command ends.

    Args:
        arguments: arguments of the command line, without the program's name.
        prestarted: owner of the child process.
    """
    command, *options = arguments or ("",)
    if _HELP & set(options) or _COMMAND in options:
        return
    if command == "estimate" and _value(options, "--engine") != "virtual":
        prestarted.prestart(tracing_worker())
    elif command in {"tune", "run"}:
        prestarted.prestart(fork_server("cuda" if _has_cards() and _value(options, "--device") != "cpu" else "cpu"))


def _value(options: Sequence[str], requested: str) -> str | None:
    """The value of an option, in either notation."""
    for option, following in zip(options, [*options[1:], None], strict=True):
        name, separator, value = option.partition("=")
        if name == requested:
            return value if separator else following
    return None


def _has_cards() -> bool:
    return _CARDS.is_dir() and any(_CARDS.iterdir())
