"""Checkpoints of a run: written whole, between updates, and enough to go on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from tuner.errors import CheckpointError
from tuner.files import appearing_whole, replacing, write_atomically
from tuner.training.runs import RunPaths

State = dict[str, Any]
"""What a checkpoint holds: nested dicts of tensors and plain values."""

_LAYOUT = 1


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

    def save(self, update: int, state: State) -> Path:
        """Write the state after ``update`` updates; it becomes the newest only once it is safely on the disk."""
        path = self.directory / f"update-{update:08d}.pt"
        with appearing_whole(path) as stream:
            torch.save({"layout": _LAYOUT, "run": self.run, "update": update, "state": state}, stream)
        write_atomically(self._pointer, json.dumps({"update": update, "file": path.name}))
        self._keep_up_to(path)
        return path

    def _keep_up_to(self, newest: Path) -> None:
        """Remove all but ``newest`` and those before it that are to be kept: old ones, and what a kill left."""
        files = sorted(self.directory.glob("update-*.pt"))
        kept = [path for path in files if path <= newest][-self.keep :]
        for path in [*files, *self.directory.glob(".update-*.part")]:
            if path not in kept:
                path.unlink(missing_ok=True)

    def newest(self) -> tuple[int, State] | None:
        """The newest checkpoint's update and state (on the CPU), or none when there is none yet.

        Raises:
            CheckpointError: when it cannot be read, or belongs to another run.
        """
        if not self._pointer.exists():
            return None
        path = self.directory / json.loads(self._pointer.read_text())["file"]
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        if content["layout"] != _LAYOUT:
            raise CheckpointError(f"checkpoint {path} has layout {content['layout']}, this version reads {_LAYOUT}")
        if content["run"] != self.run:
            raise CheckpointError(
                f"checkpoint {path} belongs to another run (another model, seed or effective batch): train into an "
                "empty directory, or remove its checkpoints"
            )
        return content["update"], content["state"]


def random_state(device: torch.device) -> State:
    """The state of every random number generator that user code may use."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - user code may use the old interface
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: State, device: torch.device) -> None:
    """Put back what ``random_state`` gave."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - see random_state
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed every random number generator that user code may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - see random_state
    torch.manual_seed(seed)


def save_weights(model: nn.Module, path: Path) -> str:
    """Write the model's weights as safetensors, whole or not at all; returns the file's SHA-256.

    Tied tensors are stored once, as safetensors requires.
    """
    with replacing(path) as beside:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            safetensors.torch.save_model(model, str(beside))
        with beside.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
