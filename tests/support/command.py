"""The command line in the test's own process, since one of its own takes seconds to start; whether others run."""

import io
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from batchwright.cli.main import main


def called(
    *arguments: str | Path, cwd: Path | None = None, columns: int = 80, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``batchwright`` prints with these arguments, and its exit status; what it does not catch is raised."""
    command = ["batchwright", *map(str, arguments)]
    printed, told = io.StringIO(), io.StringIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with (
        patch.object(sys, "argv", command),
        patch.dict(os.environ, {"COLUMNS": str(columns), **environment}),
        redirect_stdout(printed),
        redirect_stderr(told),
        chdir(cwd or Path.cwd()),
    ):
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(command, status, printed.getvalue(), told.getvalue())


def is_running(pid: int | str) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
