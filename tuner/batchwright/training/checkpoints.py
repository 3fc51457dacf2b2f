"""Checkpoints of a run, written atomically between updates. A run that resumes from one continues bit-equal."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from batchwright.errors import CheckpointError, DamagedCheckpointError
from batchwright.system.files import atomic_folder, atomic_path
from batchwright.torch_internals import tree_leaves
from batchwright.training.launching.checkpoint_files import (
    check_files,
    checkpoint_folder,
    committed_updates,
    digest_of,
    pointed_update,
    read_checked,
    read_manifest,
    write_checked,
    write_manifest,
    write_pointer,
)
from batchwright.training.launching.run_directory import RunPaths

State = dict[str, Any]
"""All state in a checkpoint but the weights: nested dicts of tensors and plain values."""
Weights = dict[str, Tensor]
"""Parameters and buffers by name, on the CPU."""

_WEIGHTS = "model.safetensors"
_STATE = "state.pt"
_EVALUATION = "evaluation.json"
"""State after an evaluation of the checkpoint's weights. Without it, they are evaluated again."""


@dataclass(frozen=True)
class IntactCheckpoint:
    """The newest checkpoint whose files are unchanged since they were written."""

    update: int
    """Updates that were made before the checkpoint."""
    notes: tuple[str, ...]
    """A sentence for each newer checkpoint that is damaged, and for a pointer that cannot be read."""


class Checkpoints:
    """The checkpoints of a run in one folder, with a pointer to the newest.

    The newest ``keep`` are kept. A checkpoint of another ``run`` (an identity of model, data order and plan) is
    refused.
    """

    def __init__(self, paths: RunPaths, run: str, keep: int) -> None:
        self.directory = paths.checkpoints
        self._pointer = paths.newest_checkpoint
        self.run = run
        self.keep = keep

    def save(self, update: int, weights: Weights, state: State, best: int | None = None) -> Path:
        """Write the checkpoint after ``update`` updates, which becomes the newest once it is on the disk.

        The checkpoint of the update ``best`` is kept, however old.

        Raises:
            StorageError: when the disk is full. Earlier checkpoints are kept.
        """
        path = checkpoint_folder(self.directory, update)
        needed = bytes_of_weights(weights) + _bytes_of(state)
        with atomic_folder(path, needed) as folder:
            write_weights(weights, folder / _WEIGHTS)
            with (folder / _STATE).open("wb") as stream:  # a stream's error says more than torch's error for a path
                torch.save(state, stream)
            write_manifest(folder, self.run, update)
        # Only now: whenever this process is killed, the pointer names a whole checkpoint, and the old ones are there.
        write_pointer(self._pointer, update)
        folders = sorted(self.directory.glob("update-*"))
        kept = {*[each for each in folders if each <= path][-self.keep :]}
        if best is not None:
            kept.add(checkpoint_folder(self.directory, best))
        for each in [*folders, *self.directory.glob(".update-*.part")]:  # with the leftovers of a kill
            if each not in kept:
                shutil.rmtree(each, ignore_errors=True)
        return path

    def add_evaluation(self, update: int, state: State) -> None:
        """Add the state that an evaluation has changed to the checkpoint after ``update`` updates.

        ``load`` returns these plain values in place of those that were saved.

        Raises:
            StorageError: when the disk is full. The checkpoint is kept as it was.
        """
        write_checked(checkpoint_folder(self.directory, update) / _EVALUATION, state)

    def newest(self) -> IntactCheckpoint | None:
        """The newest intact checkpoint, every file compared with its checksum; None when there is none yet.

        Raises:
            CheckpointError: when there are checkpoints and none is intact, or one belongs to another run.
        """
        notes: list[str] = []
        if self._pointer.exists() and pointed_update(self._pointer) is None:
            notes.append(f"{self._pointer} cannot be read: the newest intact checkpoint is used")
        for update in committed_updates(self._pointer):
            try:
                self._verified(update)
            except DamagedCheckpointError as error:
                notes.append(f"checkpoint {checkpoint_folder(self.directory, update)} is damaged: {error}")
            else:
                newer = [*notes, f"the run resumes from the older checkpoint of update {update}"] if notes else []
                return IntactCheckpoint(update, tuple(newer))
        if notes:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is intact: {'; '.join(notes)}. Restore one from a backup, or "
                "remove the folder to start from the beginning"
            )
        return None

    def _verified(self, update: int) -> Path:
        """Return the folder of a checkpoint after checking that it is intact and of this run."""
        folder = checkpoint_folder(self.directory, update)
        if not folder.is_dir():
            raise DamagedCheckpointError("the folder is missing")
        manifest = read_manifest(folder)
        if manifest.run != self.run:
            raise CheckpointError(
                f"checkpoint {folder} belongs to another run (another model, seed or effective batch): train into an "
                "empty directory, or remove its checkpoints"
            )
        if manifest.update != update or not {_WEIGHTS, _STATE} <= set(manifest.files):
            raise DamagedCheckpointError("the manifest is of another checkpoint")
        check_files(folder, manifest)
        return folder

    def load(self, update: int, *, checked: bool = False) -> tuple[Weights, State]:
        """Load the weights and the state (on the CPU) of a checkpoint.

        The files are compared with their checksums, unless this process has just ``checked`` them.

        Raises:
            CheckpointError: when the checkpoint is missing, damaged, cannot be read, or belongs to another run.
        """
        path = checkpoint_folder(self.directory, update)
        with _as_checkpoint_error(path):
            if not checked:
                self._verified(update)
            state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
            state |= read_checked(path / _EVALUATION) or {}
            return safetensors.torch.load_file(path / _WEIGHTS), state

    def load_weights(self, update: int) -> Weights:
        """Load the weights of a checkpoint alone, on the CPU.

        Raises:
            CheckpointError: as ``load``.
        """
        path = checkpoint_folder(self.directory, update)
        with _as_checkpoint_error(path):
            return safetensors.torch.load_file(self._verified(update) / _WEIGHTS)

    def load_averages(self, update: int) -> list[Tensor]:
        """Map the moving averages of a checkpoint that ``load_weights`` has verified, in the order of the parameters.

        The rest of its state, such as the optimizer's, is not read.

        Raises:
            CheckpointError: when the checkpoint cannot be read.
        """
        path = checkpoint_folder(self.directory, update)
        with _as_checkpoint_error(path):
            state = torch.load(path / _STATE, map_location="cpu", weights_only=True, mmap=True)
            averages: list[Tensor] = state["averages"]
            return averages


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def bytes_of_weights(weights: Weights) -> int:
    """Bytes of tensors, those that share memory counted once."""
    return _bytes_of([weights[name] for name in unique_names(weights)])


def _bytes_of(value: object) -> int:
    """Bytes of the tensors in nested dicts, lists and tuples."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def write_weights(weights: Weights, path: Path) -> None:
    """Write tensors as safetensors. Tensors that share memory (tied weights) are written once, by their first name."""
    unshared = {}
    for name in unique_names(weights):  # each in memory of its own, as safetensors requires
        tensor = weights[name]
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        unshared[name] = tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)
    safetensors.torch.save_file(unshared, path, metadata={"format": "pt"})


def unique_names(weights: Weights) -> list[str]:
    """One name for each tensor of ``weights``: the first of the names that share memory."""
    first: dict[tuple[Any, ...], str] = {}
    for name in sorted(weights):
        tensor = weights[name]
        storage = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(storage, name)
    return sorted(first.values())


def with_tied_names(weights: Weights, model: nn.Module) -> Weights:
    """``weights`` of a file, which has one name of each tensor, with the other names that ``model`` has for them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = {id(parameters[name]): name for name in weights if name in parameters}
    others = {name: weights[written[id(tied)]] for name, tied in parameters.items() if id(tied) in written}
    return {**others, **weights}


def save_weights(weights: Weights, path: Path) -> str:
    """Write the weights of a run as safetensors, atomically. Return the file's SHA-256.

    Raises:
        StorageError: when the disk is full.
    """
    with atomic_path(path, bytes_of_weights(weights)) as temporary:
        write_weights(weights, temporary)
        return digest_of(temporary).sha256
