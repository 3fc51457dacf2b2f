"""Private folders of the service."""

import os
import tempfile
from pathlib import Path

from batchwright_service.errors import ConfigurationError


def make_private_folder(folder: Path) -> Path:
    """Create a folder that only this user may read; an existing folder keeps its mode.

    Raises:
        ConfigurationError: when the folder cannot be created or written; names the folder, the user and the remedy.
    """
    remedy = "make it a folder that this user may write, or choose another (BATCHWRIGHT_DATA_DIR)"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {folder} cannot be created{_by(error)}: {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigurationError(f"the folder {folder} cannot be written{_by()}: {remedy}")
    return folder


def create_private_file(path: Path) -> None:
    """Create an empty file that only this user may read, unless the file exists.

    Raises:
        ConfigurationError: when the file cannot be created; names the file, the user and the remedy.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be created{_by(error)}: give that folder to this user") from None


def check_temporary_folder() -> None:
    """Check that there is a folder of temporary files.

    Raises:
        ConfigurationError: when none can be written, as in a container with a read-only root and no volume at `/tmp`.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigurationError(
            f"no folder of temporary files can be written{_by()}: mount one at /tmp (`--tmpfs /tmp:mode=1777`), or "
            "name one in TMPDIR"
        ) from None


def _by(error: OSError | None = None) -> str:
    reason = "" if error is None else f" ({error.strerror})"
    return f" by user {os.geteuid()}{reason}"
