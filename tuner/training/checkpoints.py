"""Checkpoints of a run: written whole, between updates, and enough to go on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tuner.errors import CheckpointError
from tuner.files import folder_appearing_whole, replacing, write_atomically
from tuner.training.runs import RunPaths

State = dict[str, Any]
"""What a checkpoint holds beside the weights: nested dicts of tensors and plain values."""
Weights = dict[str, Tensor]
"""Parameters and buffers by name, on the CPU."""

_LAYOUT = 2
_WEIGHTS = "model.safetensors"
_STATE = "state.pt"


class Checkpoints:
    """The checkpoints in one folder, newest kept, with a pointer to the newest.

    Args:
        paths: the run's files.
        run: what the run is (model, data order, plan); a checkpoint of another run is refused.
        keep: how many of the newest to keep.
    """

    def __init__(self, paths: RunPaths, run: str, keep: int) -> None:
        self.directory = paths.checkpoints
        self._pointer = paths.newest_checkpoint
        self.run = run
        self.keep = keep

    def save(self, update: int, weights: Weights, state: State) -> Path:
        """Write a run after ``update`` updates; it becomes the newest only once it is safely on the disk."""
        path = self.directory / f"update-{update:08d}"
        with folder_appearing_whole(path) as folder:
            write_weights(weights, folder / _WEIGHTS)
            torch.save({"layout": _LAYOUT, "run": self.run, "update": update, "state": state}, folder / _STATE)
        write_atomically(self._pointer, json.dumps({"update": update, "folder": path.name}))
        self._keep_up_to(path)
        return path

    def _keep_up_to(self, newest: Path) -> None:
        """Remove all but ``newest`` and those before it that are to be kept: old ones, and what a kill left."""
        folders = sorted(self.directory.glob("update-*"))
        kept = [path for path in folders if path <= newest][-self.keep :]
        for path in [*folders, *self.directory.glob(".update-*.part")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[int, Weights, State] | None:
        """The newest checkpoint's update, weights and state (on the CPU), or none when there is none yet.

        Raises:
            CheckpointError: when it cannot be read, or belongs to another run.
        """
        if not self._pointer.exists():
            return None
        path = self._newest_folder()
        try:
            content = torch.load(path / _STATE, map_location="cpu", weights_only=True)
            weights = safetensors.torch.load_file(path / _WEIGHTS)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        if content["layout"] != _LAYOUT:
            raise CheckpointError(f"checkpoint {path} has layout {content['layout']}, this version reads {_LAYOUT}")
        if content["run"] != self.run:
            raise CheckpointError(
                f"checkpoint {path} belongs to another run (another model, seed or effective batch): train into an "
                "empty directory, or remove its checkpoints"
            )
        return content["update"], weights, content["state"]

    def _newest_folder(self) -> Path:
        try:
            return self.directory / str(json.loads(self._pointer.read_text())["folder"])
        except (ValueError, KeyError):
            raise CheckpointError(
                f"{self._pointer} is not of this version: train into an empty directory, or remove its checkpoints"
            ) from None


def write_weights(weights: Weights, path: Path) -> None:
    """Write tensors as safetensors; those that share their memory (tied weights) once, under their first name."""
    whole = {name: _apart(weights[name]) for name in own_names(weights)}
    safetensors.torch.save_file(whole, path, metadata={"format": "pt"})


def _apart(tensor: Tensor) -> Tensor:
    """``tensor`` in memory that it shares with no other, as safetensors requires."""
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)


def own_names(weights: Weights) -> list[str]:
    """The names of ``weights`` without those that are another name of a tensor before."""
    first: dict[tuple[Any, ...], str] = {}
    for name in sorted(weights):
        tensor = weights[name]
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(place, name)
    return sorted(first.values())


def save_weights(weights: Weights, path: Path) -> str:
    """Write the weights of a run as safetensors, whole or not at all; returns the file's SHA-256."""
    with replacing(path) as beside:
        write_weights(weights, beside)
        with beside.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
