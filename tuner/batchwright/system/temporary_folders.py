"""Folders for temporary files that do not outlive their process for long, however it ends."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

LONGEST_WITH_SOCKETS = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path, in bytes, of a folder for temporary files in which ``multiprocessing`` can make the sockets by which
data loaders receive tensors from their workers. The address of a socket has at most 107 bytes (unix(7))."""
_PREFIX = "batchwright-tmp-"
_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")


def is_in_temporary_folder(path: Path) -> bool:
    """Return whether a ``TemporaryFolder`` has the path. A file that the user named in ``TMPDIR`` is in none."""
    return any(_NAME.fullmatch(part) for part in path.parts)


class TemporaryFolder:
    """A new folder that only this user may read, removed with its files by ``remove`` or at the end of a block.

    The process locks its folder. A process that is killed loses the lock: the next one to make a folder beside it
    removes what was left. Processes forked from the owner share its lock; programs that it starts do not.

    Args:
        parent: the folder to make it in; that for temporary files (``TMPDIR``) by default.

    Attributes:
        path: the folder.

    Raises:
        OSError: when the folder cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _lock_new(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, as far as its files can be removed. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


@contextmanager
def room_for_sockets(folder: Path) -> Iterator[Path]:
    """Yield a path to a folder that leaves room for the addresses of sockets: a link in ``/tmp`` if it is too long.

    Without that a data loader waits forever for its workers. If ``/tmp`` cannot be used, the path is yielded unchanged.
    """
    with ExitStack() as stack:
        if len(os.fsencode(folder)) > LONGEST_WITH_SOCKETS:
            with suppress(OSError):
                link = stack.enter_context(TemporaryFolder(Path("/tmp"))) / "tmp"  # noqa: S108 - a private folder in it
                link.symlink_to(folder)
                folder = link
        yield folder


def _lock_new(folder: Path) -> int | None:
    """Lock a folder that was just made; where the file system has no locks, go without: nobody else gets one there.

    Returns:
        A descriptor that holds the lock until it is closed; None when another process took the folder for abandoned.
    """
    try:
        descriptor = _open(folder)
    except FileNotFoundError:
        return None
    except OSError:
        folder.rmdir()
        raise
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if folder.is_dir():  # nobody else takes the name of a folder that was removed
        return descriptor
    os.close(descriptor)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user that no process has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _NAME.fullmatch(folder.name) is None:
            continue
        with suppress(OSError):  # of another user, locked, without locks, or removed just now
            descriptor = _open(folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
