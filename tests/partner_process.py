"""What the partners of ``test_partner.py`` run: it tells what it was given, and waits to be left."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence


def main(connection: socket.socket, parent: int, arguments: Sequence[str]) -> None:
    """Tell, print, and stay until the connection ends."""
    about = {
        "parent": parent,
        "arguments": list(arguments),
        "asked": os.environ.get("ASKED"),
        "input": sys.stdin.read(),
    }
    sys.stderr.write("x" * 1000 + "the last words\n")
    sys.stderr.flush()
    connection.sendall(json.dumps(about).encode() + b"\n")
    connection.recv(1)
