"""Run a command on virtual GPUs: ``python -m batchwright.virtual_gpu --gpu T4 -- python train.py``."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from batchwright.errors import BatchwrightError
from batchwright.units import parse_bytes
from batchwright.virtual_gpu.description import VirtualHost, load_host
from batchwright.virtual_gpu.session import DEFAULT_COMPUTE_LIMIT_BYTES, VirtualGpuSession

_WRONG_USE = 2
_SIGNALLED = 128
"""Added to the number of the signal that ended the command, as shells do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in a session of its own, and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command after `--`")
    if (options.host is None) == (not options.gpu):
        parser.error("give either --gpu, once or more often, or --host")
    try:
        host = VirtualHost.of(*options.gpu) if options.host is None else load_host(options.host)
        with VirtualGpuSession(host, compute_limit_bytes=options.compute_limit) as session:
            status = subprocess.run(command, env={**os.environ, **session.environment()}, check=False).returncode  # noqa: S603
    except (BatchwrightError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return _WRONG_USE
    return status if status >= 0 else _SIGNALLED - status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m batchwright.virtual_gpu",
        description="Run a command with virtual GPUs under torch's CUDA build. Nothing it shows is measured on a GPU.",
    )
    parser.add_argument("--gpu", action="append", default=[], metavar="MODEL", help="a GPU, for example T4; repeatable")
    parser.add_argument("--host", type=Path, metavar="FILE", help="a description of the host, in YAML")
    parser.add_argument(
        "--compute-limit",
        type=parse_bytes,
        default=DEFAULT_COMPUTE_LIMIT_BYTES,
        metavar="SIZE",
        help="compute operators whose tensors have at most this size (default 1MiB; 0: none)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    return parser


if __name__ == "__main__":
    sys.exit(main())
