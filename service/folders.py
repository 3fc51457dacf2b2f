"""Private folders of the service."""

from __future__ import annotations

from pathlib import Path

from service.errors import ConfigurationError


def make_private_folder(folder: Path) -> Path:
    """Create a folder that only this user may read; an existing folder keeps its mode.

    Raises:
        ConfigurationError: when the folder cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {folder} cannot be created ({error.strerror}): choose another") from None
    return folder
