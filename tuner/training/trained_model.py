"""Write the trained model: its weights, and for a transformers model a folder that ``from_pretrained`` loads."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import safetensors

from tuner.schemas.workload import TransformersModel, WorkloadSpec
from tuner.system.data_roots import DataRoots
from tuner.system.files import atomic_folder, atomic_path
from tuner.training.checkpoints import Weights, bytes_of_weights, save_weights, unique_names
from tuner.workloads.build import build_workload
from tuner.workloads.pretrained.pretrained_output import copy_tokenizer, save_pretrained

_WEIGHTS = "model.safetensors"


class ModelWriter:
    """Writer of a run's model.

    Args:
        spec: the spec of the run.
    """

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec

    def __call__(self, weights: Weights, path: Path, folder: Path) -> str:
        """Write the weights to ``path``, and a transformers model to ``folder`` too. Return the SHA-256 of ``path``.

        The two files of weights are one, where transformers uses the names of the parameters.

        Raises:
            StorageError: when the disk is full.
        """
        if not isinstance(self._spec.model, TransformersModel):
            return save_weights(weights, path)
        with atomic_folder(folder, bytes_of_weights(weights)) as partial:
            self._save_pretrained(self._spec.model, weights, partial)
        return _linked(folder / _WEIGHTS, weights, path) or save_weights(weights, path)

    def _save_pretrained(self, model: TransformersModel, weights: Weights, folder: Path) -> None:
        plain = self._spec.model_copy(update={"activation_checkpointing": False})
        save_pretrained(build_workload(plain).build_model, weights, folder)
        roots = DataRoots.from_environment(os.environ)
        if model.pretrained is not None:
            copy_tokenizer(Path(model.pretrained), folder, roots)
        tokenizer = getattr(self._spec.data, "tokenizer", "bytes")
        if tokenizer != "bytes":
            copy_tokenizer(Path(tokenizer), folder, roots)


def _linked(source: Path, weights: Weights, path: Path) -> str | None:
    """Make ``path`` another name of ``source``, if that holds ``weights`` by their names. Return its SHA-256.

    Of tensors that share memory (tied weights), transformers may have chosen another one of their names.
    """
    with safetensors.safe_open(source, framework="pt") as stored:
        names = set(stored.keys())
    if not names <= set(weights) or len(names) != len(unique_names(weights)):
        return None
    try:
        with atomic_path(path) as temporary:
            os.link(source, temporary)
    except OSError:  # a file system without hard links
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
