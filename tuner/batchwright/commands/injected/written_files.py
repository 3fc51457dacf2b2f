"""Report the files outside of the probe's own folders that this process makes, changes, replaces or removes.

An audit hook (PEP 578) sees what Python opens, renames and removes, before that is done. Writers in native code raise
no audit event: for those of torch and safetensors one is raised here. A file is the user's if its status has not
changed since the tuning began (`st_ctime`, which the kernel sets).
"""

from __future__ import annotations

import os
import stat
import sys

from .reporting import read_settings, report

TYPE_CHECKING = False  # that of `typing`, which would be imported into every process
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_REPLACING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MOST_NAMED = 100
"""Files of a kind that a process names; of more it reports the count, ever more rarely."""
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
    *("MPLCONFIGDIR", "PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
)
"""Variables that name folders of caches and of tools' settings, which every run of a program writes."""
_CACHES_OF_USER = (
    *("~/.cache", "~/.triton", "~/.nv", "~/.config", "~/.local/state"),
    *("~/.ipython", "~/.jupyter", "~/.keras", "~/.fastai"),
)


def watch(folder: str) -> bool:
    """Watch this process, and the ones that it forks, to their ends. Return false in a job, which is not watched."""
    try:
        settings = read_settings(folder)
    except OSError:  # the folder is gone: the probe has ended
        return False
    if not settings["ends"]:
        return False
    written = FileWatch(folder, settings["tuning_began_at"], settings["probe_began_at"])
    os.register_at_fork(after_in_child=written.forget)
    handlers = {
        "open": written.opened,
        "os.rename": written.renamed,
        "os.remove": written.removed,
        "os.truncate": written.truncated,
        "os.link": lambda _source, path, _source_folder, place: written.made(path, place),
        "os.symlink": lambda _source, path, place: written.made(path, place),
        "sqlite3.connect": written.connected,
    }
    find: Any = handlers.get

    def take(event: str, arguments: tuple[Any, ...]) -> None:
        handler = find(event)
        if handler is not None:
            try:
                handler(*arguments)
            except Exception:  # noqa: BLE001 - an error here would be one of the program's own call
                return

    sys.addaudithook(take)
    return True


def audit_torch(torch: Any) -> None:
    """Have torch raise an audit event where it opens a file in native code."""
    from .torch_internals import replace_file_writer  # noqa: PLC0415 - imports `typing`

    replace_file_writer(torch, _audit)


def audit_safetensors(safetensors: Any) -> None:
    """Have safetensors raise an audit event where it writes a file; its other modules import the name from here."""
    write: Callable[..., Any] = safetensors.serialize_file

    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        _audit(filename)
        return write(tensors, filename, *args, **kwargs)

    safetensors.serialize_file = serialize_file


def _audit(path: Any) -> None:
    sys.audit("open", path, "w", _REPLACING)


class FileWatch:
    """What this process has done to files.

    Both times are the `st_ctime` of a file that was made at the begin of the first probe, and of this one.
    """

    def __init__(self, folder: str, tuning_began_at: float, probe_began_at: float) -> None:
        self._folder = folder
        self._tuning_began_at = tuning_began_at
        self._probe_began_at = probe_began_at
        # The probe's own, the system's, and those of caches and settings.
        places = [folder, os.environ.get("TMPDIR", folder), "/dev", "/proc", "/sys"]
        places += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        places += [os.path.expanduser(name) for name in _CACHES_OF_USER]
        found = {os.path.abspath(place) for place in places}
        self._outside = tuple(place + os.sep for place in found | {os.path.realpath(place) for place in found})
        self._counts: dict[str, int] = {}
        self._found: dict[str, str] = {}
        """What was last reported of each file."""

    def forget(self) -> None:
        """Count anew in a forked process."""
        self._counts = {}

    def opened(self, path: Any, _mode: object, flags: int) -> None:
        """Take that a file is opened."""
        name = self._name(path) if flags & _WRITING else None
        status = _status(name, follows=True)
        if status is None:
            if flags & os.O_CREAT:
                self._take(name, "made")
        elif stat.S_ISREG(status.st_mode) and status.st_size:
            self._take_existing(name, status, "replaced" if flags & os.O_TRUNC else "changed")

    def truncated(self, path: Any, _length: int) -> None:
        """Take that a file is cut off."""
        self.opened(path, None, _REPLACING)

    def connected(self, path: Any) -> None:
        """Take that a database of SQLite is opened."""
        if not os.fsdecode(path).startswith((":", "file:")):
            self.opened(path, None, os.O_RDWR | os.O_CREAT)

    def removed(self, path: Any, folder: int) -> None:
        """Take that a file is removed. A symbolic link, such as a tracker's `latest-run`, has no content to lose."""
        name = self._name(path, folder)
        status = _status(name)
        if status is not None:
            self._take_existing(name, status, "changed" if stat.S_ISLNK(status.st_mode) else "replaced")

    def renamed(self, source: Any, path: Any, source_folder: int, folder: int) -> None:
        """Take that a file or folder gets another name, under which another file may have been."""
        self.removed(source, source_folder)
        self.removed(path, folder)
        self.made(path, folder)

    def made(self, path: Any, folder: int) -> None:
        """Take that a file or link is made, if there is none of its name."""
        name = self._name(path, folder)
        if _status(name) is None:
            self._take(name, "made")

    def _name(self, path: Any, folder: int = -1) -> str | None:
        """The absolute path of a file that is named from an open folder, or from the working directory for -1.

        None for an open descriptor, and for a file that is not of interest.
        """
        if isinstance(path, int):
            return None
        name = os.fsdecode(path)
        if folder != -1:
            name = os.path.join(os.readlink("/proc/self/fd/" + str(folder)), name)
        name = os.path.abspath(name)
        return None if name.startswith(self._outside) or "/__pycache__/" in name else name

    def _take_existing(self, name: str | None, status: os.stat_result, how: str) -> None:
        """Take a change of an existing file by the time at which it was made or last changed."""
        if name is None:
            return
        earlier = self._found.get(name)
        if earlier == "changed" and how == "replaced":
            self._take(name, how)  # its time is that of the change
        elif earlier is None and status.st_ctime < self._tuning_began_at:
            self._take(name, how)
        elif earlier is None and status.st_ctime < self._probe_began_at:
            self._take(name, "remade")

    def _take(self, name: str | None, how: str) -> None:
        if name is None or self._found.get(name) == how:
            return
        self._found[name] = how
        self._counts[how] = count = self._counts.get(how, 0) + 1
        if count <= _MOST_NAMED or count & (count - 1) == 0:
            report(self._folder, "file", path=name[:1000], how=how, count=count)


def _status(name: str | None, *, follows: bool = False) -> os.stat_result | None:
    try:
        return os.stat(name, follow_symlinks=follows) if name is not None else None
    except OSError:
        return None
