"""The child process of the tests of ``tuner.system.subprocesses``: report the arguments, then wait for the end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def main(connection: socket.socket, parent: int, arguments: Sequence[str]) -> None:
    """Tell, print, and stay until the connection ends."""
    about: dict[str, Any] = {"parent": parent, "arguments": list(arguments)}
    if about["arguments"] == ["has a child"]:
        about["child"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    about |= {"asked": os.environ["ASKED"], "input": sys.stdin.read()}
    sys.stderr.write("x" * 1000 + "the last words\n")
    sys.stderr.flush()
    connection.sendall(json.dumps(about).encode() + b"\n")
    connection.recv(1)
