"""Write the events of this process to its file in the folder of the probe: one line of JSON per event."""

from __future__ import annotations

import json
import os
import sys
import time

SETTINGS = "settings.json"
_EVENTS = "events"


def _path(folder: str, suffix: str) -> str:
    return os.path.join(folder, _EVENTS, str(os.getpid()) + suffix)


def stacks_path(folder: str) -> str:
    """The file of this process for the stacks of its threads."""
    return _path(folder, ".stacks")


def read_settings(folder: str) -> dict:  # type: ignore[type-arg]
    """The settings that the supervisor wrote for all processes of the command."""
    with open(os.path.join(folder, SETTINGS), encoding="utf-8") as stream:
        return dict(json.load(stream))


def report(folder: str, event: str, **fields: object) -> None:
    """Append an event. One write of less than a page: lines of two threads do not mix."""
    line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
    try:
        descriptor = os.open(_path(folder, ".jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:  # the folder is gone: the probe has ended
        sys.stderr.write("batchwright: an event of the probe was not written: " + str(error) + "\n")


def write_progress(folder: str, **fields: object) -> None:
    """Replace the progress of this process, which a job writes instead of an event for each update."""
    path = _path(folder, ".progress")
    try:
        with open(path + ".partial", "w", encoding="utf-8") as stream:
            json.dump(fields, stream)
        os.replace(path + ".partial", path)
    except OSError:  # the folder is gone: nobody follows the job any more
        return


def report_start(folder: str) -> None:
    """Report that this process has started, with its command line."""
    arguments = getattr(sys, "orig_argv", sys.argv)
    report(
        folder,
        "start",
        pid=os.getpid(),
        argv=[argument[:200] for argument in arguments[:20]],
        python=".".join(str(part) for part in sys.version_info[:3]),
    )
