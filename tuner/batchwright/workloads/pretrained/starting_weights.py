"""Build a transformers model with the weights of a folder, as a run starts from them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn

from batchwright.device_traits import traits_of
from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.field_errors import listed
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.workloads.config_fields import TransformersConfig
from batchwright.workloads.pretrained.folder_config import CONFIG

if TYPE_CHECKING:
    from io import BufferedReader

AutoClass: TypeAlias = Any
"""An ``AutoModelFor...`` class of transformers."""
_ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable by which transformers loads without threads."""
_MOST_NAMES = 5
"""Names of tensors in a message."""


class StartingWeights:
    """The weights that a run starts from: those of a folder in the format of ``save_pretrained``.

    Args:
        folder: the folder.
        note: called with a sentence for each fact that the user should know, such as tensors that the folder lacks.
        roots: the folders that may be read.
    """

    def __init__(self, folder: Path, note: Callable[[str], None], roots: DataRoots = ANY_FILE) -> None:
        self.folder = folder
        self._note = note
        self._roots = roots

    def __call__(self, auto_class: AutoClass, config: TransformersConfig) -> nn.Module:
        """Build the model of a config with these weights, in fp32.

        Tensors that the folder lacks, such as a new head, keep their random values, and a note names them.

        Raises:
            SpecError: when the folder has no safetensors, or none that fit the model.
            DataOutsideRootsError: when the folder, or a link in it, leads outside the roots.
        """
        self._files()
        try:
            with _without_threads():
                model, report = auto_class.from_pretrained(
                    self.folder,
                    config=config,
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._problem(f"cannot be loaded: {' '.join(str(error).split())}") from error
        self._check(model, report)
        for module in model.modules():
            inner = getattr(module, "config", None)
            if inner is not None and hasattr(inner, "_name_or_path"):
                inner._name_or_path = ""  # noqa: SLF001 - the folder, with which transformers would save the model
        loaded: nn.Module = model
        return loaded

    def digest(self) -> str:
        """SHA-256 over the names and contents of the weights' files, in hexadecimal."""
        digest = hashlib.sha256()
        for path in self._files():
            with self._roots.open(path) as stream:
                content = hashlib.file_digest(cast("BufferedReader", stream), "sha256").hexdigest()
                digest.update(f"{path.name} {content}\n".encode())
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        """The files of the weights, after checking that transformers will read no file but those of the folder."""
        for path in (*self.folder.glob("*.json"), *self.folder.glob("*.safetensors"), self.folder / CONFIG):
            self._roots.resolve(path)
        if (self.folder / _ADAPTER).exists():  # which names a base model, anywhere
            raise self._problem("holds an adapter (`adapter_config.json`): merge it into its model, and save that")
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise self._problem("has no safetensors: save the model again with a current transformers")
        elsewhere = self._indexed() - {path.name for path in files}
        if elsewhere:
            raise self._problem(f"lacks {_names(sorted(elsewhere))}, which its index of weights names")
        return files

    def _indexed(self) -> set[str]:
        """The files that the index of sharded weights names."""
        path = self.folder / _INDEX
        if not path.exists():
            return set()
        try:
            with self._roots.open(path) as stream:
                return set(map(str, json.load(stream)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._problem(f"has an index of weights that cannot be read: {error}") from error

    def _check(self, model: nn.Module, report: dict[str, Any]) -> None:
        missing, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
        if len(missing) >= len(model.state_dict()):
            raise self._problem(f"has no tensor of a {type(model).__name__}; it has {_names(unused)}")
        if missing:
            self._note(f"{_names(missing)} of the model are not in {self.folder}: they start from random values")
        if unused:
            self._note(f"{_names(unused)} of {self.folder} are not part of the model, and are not used")

    def _problem(self, message: str) -> SpecError:
        return SpecError([FieldProblem("model.pretrained", f"{self.folder} {message}")])


@contextmanager
def _without_threads() -> Iterator[None]:
    """Have transformers load in this thread, onto the CPU, and show no bar, which has a thread too.

    The C library keeps the stacks of threads that have ended (8 MiB each), and so a job would take up to 26 MiB more
    than its probe, which has random weights.
    """
    from transformers.utils import logging  # noqa: PLC0415 - imported by now: a model's class was given

    shows, earlier = logging.is_progress_bar_enabled(), os.environ.get(_ONE_THREAD)
    logging.disable_progress_bar()
    if traits_of(torch.get_default_device().type).counts_host_memory:
        os.environ[_ONE_THREAD] = "1"
    try:
        yield
    finally:
        os.environ.pop(_ONE_THREAD, None)
        if earlier is not None:
            os.environ[_ONE_THREAD] = earlier
        if shows:
            logging.enable_progress_bar()


def _names(names: list[str]) -> str:
    return listed([f"`{name}`" for name in names], _MOST_NAMES)
