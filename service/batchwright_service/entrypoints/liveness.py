"""Record that a process of the service is alive, and check the record: `batchwright health`.

Each process has a file in the folder of temporary files, which a container shares with no other container. The check
therefore sees the processes of its own container, whatever their command, address and data folder.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from batchwright_service.errors import NotReadyError

_log = logging.getLogger(__name__)

RENEW_SECONDS = 5.0
"""Interval at which a worker renews its record."""
_SILENT_SECONDS = 30.0
"""Age from which the record of a worker is out of date; a loaded host may delay several renewals."""
_RESPONSE_SECONDS = 3.0
_START_FIELD = 19
"""Position of a process's start time after its name in `/proc/PID/stat` (field 22 of proc(5))."""
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound


@dataclass(frozen=True)
class LivenessRecord:
    """A running process of the service."""

    pid: int
    start_ticks: int
    """Start time of the process, by which a later process with the same id is recognised as another one."""
    command: str
    """`serve` or `work`."""
    url: str | None = None
    """Address of the API; none for a process that has no API and renews its record instead."""


def api_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches an API that listens on an address."""
    reached = _EVERY_ADDRESS.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


@contextmanager
def recorded(command: str, url: str | None = None) -> Iterator[Path | None]:
    """Keep a record of this process for the block, and yield its file; None where it cannot be written.

    The process works without a record, as on a full disk; the check then does not find the process.
    """
    pid = os.getpid()
    try:
        file = _written(LivenessRecord(pid, _start_ticks(pid) or 0, command, url))
    except (OSError, NotReadyError) as error:
        _log.warning("`batchwright health` will not find this process: %s", error)
        yield None
        return
    try:
        yield file
    finally:
        with suppress(OSError):
            file.unlink()


def renew(file: Path | None) -> None:
    """Renew the record of a worker. A failure, such as a full disk, is left to the next renewal."""
    if file is not None:
        with suppress(OSError):
            os.utime(file)


def _written(record: LivenessRecord) -> Path:
    folder = _folder()
    for other in folder.glob("*.json"):  # of killed processes, which could not remove theirs
        if (ended := _read(other)) is not None and _start_ticks(ended.pid) != ended.start_ticks:
            other.unlink(missing_ok=True)
    file = folder / f"{record.pid}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    partial.replace(file)
    return file


def check_alive() -> list[str]:
    """Check every process of the service that this user runs on this machine or in this container; describe each.

    Raises:
        NotReadyError: when there is none, or one does not respond or renew its record.
    """
    found = [(file, record) for file in sorted(_folder().glob("*.json")) if (record := _read(file)) is not None]
    running = [(file, record) for file, record in found if _start_ticks(record.pid) == record.start_ticks]
    if not running:
        raise NotReadyError("no process of `batchwright serve` or `batchwright work` runs here, or it is starting")
    return [_check(file, record) for file, record in running]


def _check(file: Path, record: LivenessRecord) -> str:
    name = f"batchwright {record.command} (process {record.pid})"
    if record.url is not None:
        url = f"{record.url}/livez"
        try:
            with build_opener(ProxyHandler({})).open(url, timeout=_RESPONSE_SECONDS):
                return f"{name} responds at {url}"
        except OSError as error:
            raise NotReadyError(f"{name} does not respond at {url}: {error}") from None
    age = max(0.0, time.time() - file.stat().st_mtime)
    if age > _SILENT_SECONDS:
        raise NotReadyError(f"{name} last reported {age:.0f} s ago (limit {_SILENT_SECONDS:g} s)")
    return f"{name} reported {age:.0f} s ago"


def _folder() -> Path:
    """Return this user's folder of records, which no other user may write."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise NotReadyError(f"{folder} belongs to another user: remove it, or name another folder in TMPDIR")
    return folder


def _read(file: Path) -> LivenessRecord | None:
    try:
        return LivenessRecord(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # removed by its process just now, or of another version
        return None


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None when no such process runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[_START_FIELD])
