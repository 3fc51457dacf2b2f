"""The files of a run's checkpoints: a manifest to check them against, and a pointer to the newest. No torch.

A checkpoint is a folder that appears whole, with a manifest of its files' sizes and SHA-256. A pointer beside the
folders names the newest one that was committed.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchwright.errors import CheckpointError, DamagedCheckpointError
from batchwright.schemas.base import Document, NonNegativeInt
from batchwright.system.files import write_atomically

_LAYOUT = 1
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"update-(\d{8,})")


class FileDigest(Document):
    """Size and digest of one file of a checkpoint, recorded when the file was written."""

    size_bytes: NonNegativeInt
    """Size of the file."""
    sha256: str
    """SHA-256 of the content, in hexadecimal."""


class Manifest(Document):
    """Description of a checkpoint by the process that wrote it."""

    run: str
    """Identity of the checkpoint's run: everything that the weights depend on."""
    update: NonNegativeInt
    """Optimizer updates that were made."""
    files: dict[str, FileDigest]
    """Every file but the manifest, by name."""


def checkpoint_folder(directory: Path, update: int) -> Path:
    """The folder of the checkpoint after ``update`` updates."""
    return directory / f"update-{update:08d}"


# --- the manifest ----------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, run: str, update: int) -> None:
    """Write the manifest of the files in ``folder``, read back from the disk."""
    manifest = Manifest(run=run, update=update, files={path.name: digest_of(path) for path in sorted(folder.iterdir())})
    content = manifest.model_dump(mode="json")
    document = {"layout": _LAYOUT, "manifest": content, "sha256": _sha256_of(content)}
    write_atomically(folder / _MANIFEST, json.dumps(document, indent=2))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: when the manifest is missing, or its checksum is wrong.
        CheckpointError: when the manifest has another layout than this version reads.
    """
    try:
        document = json.loads((folder / _MANIFEST).read_bytes())
        layout, content = document["layout"], document["manifest"]
        intact = document["sha256"] == _sha256_of(content)
        manifest = Manifest.model_validate(content) if layout == _LAYOUT and intact else None
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{_MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DamagedCheckpointError(f"{_MANIFEST} cannot be read: {_single_line(error)}") from None
    if not intact:
        raise DamagedCheckpointError(f"{_MANIFEST} was changed after it was written (its SHA-256 differs)")
    if manifest is None:
        raise CheckpointError(f"checkpoint {folder} has layout {layout}, this version reads {_LAYOUT}")
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a checkpoint with its manifest, reading one block at a time.

    Raises:
        DamagedCheckpointError: naming the first file that is missing, cannot be read, or differs.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size_bytes:
                raise DamagedCheckpointError(f"{name} has {size} bytes instead of {expected.size_bytes}")
            found = digest_of(path)
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {_single_line(error)}") from None
        if found != expected:
            raise DamagedCheckpointError(f"{name} was changed after it was written (its SHA-256 differs)")


def digest_of(path: Path) -> FileDigest:
    """The size and the digest of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size_bytes=stream.tell(), sha256=digest)


def _sha256_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _single_line(error: Exception) -> str:
    return " ".join(str(error).split())


# --- what is added to a checkpoint ------------------------------------------------------------------------------------


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write plain values atomically, with their checksum.

    Raises:
        StorageError: when the disk is full.
    """
    write_atomically(path, json.dumps({"content": content, "sha256": _sha256_of(content)}))


def read_checked(path: Path) -> dict[str, Any] | None:
    """Read the values of ``write_checked``; None when the file is missing or damaged."""
    try:
        document = json.loads(path.read_bytes())
        content: dict[str, Any] = document["content"]
        return content if document["sha256"] == _sha256_of(content) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the pointer -----------------------------------------------------------------------------------------------------


def write_pointer(pointer: Path, update: int) -> None:
    """Commit the checkpoint of ``update`` as the newest."""
    write_atomically(pointer, json.dumps({"update": update, "folder": checkpoint_folder(pointer.parent, update).name}))


def committed_updates(pointer: Path) -> list[int]:
    """The updates of the checkpoints that a run may resume from, the newest first. No folder is opened.

    The first is the one that the pointer names, even if its folder is missing. Newer folders were never committed. If
    the pointer cannot be read, all folders count.
    """
    if not pointer.exists():
        return []
    named = pointed_update(pointer)
    matches = (_FOLDER.fullmatch(path.name) for path in pointer.parent.glob("update-*"))
    found = sorted((int(match[1]) for match in matches if match), reverse=True)
    return found if named is None else [named, *(update for update in found if update < named)]


def pointed_update(pointer: Path) -> int | None:
    """The update that the pointer names; None when there is no pointer, or it cannot be read."""
    try:
        update = json.loads(pointer.read_bytes())["update"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return update if isinstance(update, int) and not isinstance(update, bool) and update >= 0 else None


def newest_update(pointer: Path) -> int | None:
    """The update of the newest checkpoint that has a manifest; None when there is none yet.

    The files are not compared with the manifest, which takes long: a run may have to resume from an older checkpoint.
    """
    for update in committed_updates(pointer):
        with suppress(CheckpointError):
            if read_manifest(checkpoint_folder(pointer.parent, update)).update == update:
                return update
    return None
