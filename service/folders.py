"""Folders that the service makes for itself."""

from __future__ import annotations

from pathlib import Path

from service.errors import ConfigurationError


def make_own(folder: Path) -> Path:
    """A folder that only this user may look into, made if it is not there; one that is there stays as it is.

    Raises:
        ConfigurationError: when it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {folder} cannot be made ({error.strerror}): choose another") from None
    return folder
