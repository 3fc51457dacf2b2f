"""The child process of the tests of ``spawn``: report the arguments, then wait for the end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from batchwright.system.subreaper import Channel


def main(channel: Channel, arguments: Sequence[str]) -> None:
    """Report, print, and stay until the connection ends."""
    about: dict[str, Any] = {"parent": os.getppid(), "arguments": list(arguments)}
    if about["arguments"] == ["has a child"]:
        about["child"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    about |= {"asked": os.environ["ASKED"], "input": sys.stdin.read()}
    sys.stderr.write("x" * 1000 + "the last words\n")
    sys.stderr.flush()
    channel.send(**about)
    with suppress(EOFError):
        channel.receive()
