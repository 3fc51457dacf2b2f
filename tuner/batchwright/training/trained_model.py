"""Write the trained model: its weights, and for a transformers model a folder that ``from_pretrained`` loads.

Of an adapter that is what was trained, and a folder that ``PeftModel.from_pretrained`` loads.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import safetensors
from torch import nn

from batchwright.schemas.workload import TransformersModel, WorkloadSpec
from batchwright.system.data_roots import DataRoots
from batchwright.system.files import atomic_folder, atomic_path
from batchwright.training.checkpoints import Weights, bytes_of_weights, save_weights, unique_names
from batchwright.training.launching.checkpoint_files import digest_of
from batchwright.workloads.adapters.adapter_output import save_adapter
from batchwright.workloads.build import build_workload
from batchwright.workloads.pretrained.hub_files import cache_roots, cached_model
from batchwright.workloads.pretrained.model_card import CARD
from batchwright.workloads.pretrained.pretrained_output import (
    copy_chat_template,
    copy_files_of_model,
    copy_tokenizer,
    save_pretrained,
)

_WEIGHTS = "model.safetensors"
_COPIES = {"tokenizer": copy_tokenizer, "chat_template": copy_chat_template}
"""What copies a file of the data to the model, by the field that names it."""


class ModelWriter:
    """Writer of a run's model.

    Args:
        spec: the spec of the run.
        base: folder of the frozen model of an adapter, where the spec names none.
        card: the model card of a transformers model.
        classes: names of the classes in the order of their numbers, where the data has names.
    """

    def __init__(self, spec: WorkloadSpec, base: Path, card: str, classes: Sequence[str] = ()) -> None:
        self._spec = spec
        self._card = card
        self._base = base
        self._classes = classes

    def __call__(self, weights: Weights, path: Path, folder: Path) -> str:
        """Write the weights to ``path``, and a transformers model to ``folder`` too. Return the SHA-256 of ``path``.

        The two files of weights are one, where transformers uses the names of the parameters.

        Of an adapter, ``weights`` are what was trained, and ``folder`` is as ``peft`` writes it.

        Raises:
            StorageError: when the disk is full.
        """
        model, adapter = self._spec.model, self._spec.adapter
        if not isinstance(model, TransformersModel):
            return save_weights(weights, path)
        with atomic_folder(folder, bytes_of_weights(weights)) as partial:
            if adapter is None:
                save_pretrained(self._build_model, weights, partial, self._classes)
            else:
                base = model.pretrained or str(self._base.absolute())
                save_adapter(self._build_model, adapter, model.task, weights, base, model.revision, partial)
            self._copy_files(model, partial)
            (partial / CARD).write_text(self._card, encoding="utf-8")  # in place of the empty form that peft writes
        linked = _linked(folder / _WEIGHTS, weights, path) if adapter is None else None
        return linked or save_weights(weights, path)

    def write_base(self, weights: Weights) -> None:
        """Write the frozen model of an adapter, which no other folder holds, for ``from_pretrained`` to load.

        Raises:
            StorageError: when the disk is full.
        """
        with atomic_folder(self._base, bytes_of_weights(weights)) as partial:
            save_pretrained(self._build_model, weights, partial)

    def _build_model(self) -> nn.Module:
        """Build the model alone: without adapter, reference policy and activation checkpointing."""
        plain = self._spec.model_copy(update={"activation_checkpointing": False, "adapter": None, "preference": None})
        return build_workload(plain).build_model()

    def _copy_files(self, model: TransformersModel, folder: Path) -> None:
        roots = DataRoots.from_environment(os.environ)
        source, source_roots = None if model.pretrained is None else Path(model.pretrained), roots
        if model.hub_model is not None and (source := cached_model(model.hub_model)) is not None:
            source_roots = cache_roots(source)
        if source is not None:
            copy_files_of_model(source, folder, source_roots, generates=self._spec.adapter is None)
        for read in () if self._spec.data is None else self._spec.data.paths_read():
            if (copy := _COPIES.get(read.field)) is not None:
                copy(Path(read.path), folder, roots)


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
    return digest_of(path).sha256
