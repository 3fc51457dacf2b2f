"""The ids of a run in the trackers' own systems, kept in its folder so that a resumed process goes on with them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from batchwright.system.files import write_atomically


def read_run_id(file: Path, tracker: str) -> str | None:
    """The id of the run in a tracker; None if the file has none."""
    return _read(file).get(tracker)


def write_run_id(file: Path, tracker: str, identifier: str) -> None:
    """Keep the id of the run in a tracker."""
    write_atomically(file, json.dumps({**_read(file), tracker: identifier}))


def run_id(file: Path, tracker: str) -> str:
    """The id of the run in a tracker that takes ids from its callers: the kept one, or a new one."""
    found = read_run_id(file, tracker)
    if found is None:
        found = uuid.uuid4().hex
        write_run_id(file, tracker, found)
    return found


def _read(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError):
        return {}
