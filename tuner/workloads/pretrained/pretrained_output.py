"""Write a trained transformers model in the format of ``save_pretrained``, for ``from_pretrained`` to load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tuner.system.data_roots import DataRoots

_TOKENIZER = "tokenizer.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_SETTINGS = (_CHAT_TEMPLATE, "tokenizer_config.json")
"""Files beside a `tokenizer.json` that chats need."""
_ONE_FILE = "1000TB"
"""A size of files above that of any model: the weights are written as one file."""

_TOKENIZER_FILES = (
    "added_tokens.json",
    _CHAT_TEMPLATE,
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    _TOKENIZER,
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""The files that tokenizers and processors of transformers write."""


def save_pretrained(
    build: Callable[[], nn.Module], weights: dict[str, Tensor], folder: Path, classes: Sequence[str] = ()
) -> None:
    """Write config, generation config and weights into ``folder``.

    transformers writes the names of published checkpoints, which for some models (a mixture of experts) are not those
    of the parameters.

    Args:
        build: builds the model; it is called without memory for tensors (on the ``meta`` device).
        weights: all parameters and persistent buffers by name, on the CPU.
        folder: an existing folder.
        classes: names of the classes for the config (`id2label`), in the order of their numbers.
    """
    with torch.device("meta"):
        model = build()
    if classes:
        config: Any = model.config
        config.id2label = {**config.id2label, **dict(enumerate(classes))}
        config.label2id = {name: number for number, name in config.id2label.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator] # a method of transformers' models
    model.save_pretrained(folder, max_shard_size=_ONE_FILE)  # type: ignore[operator]


def copy_tokenizer(source: Path, folder: Path, roots: DataRoots) -> None:
    """Copy the files of a tokenizer, those that there are.

    Args:
        source: a `tokenizer.json`, with its settings beside it, or the folder of a pretrained model.
        folder: an existing folder.
        roots: the folders that may be read.

    Raises:
        DataOutsideRootsError: when a file links to outside the roots.
    """
    names = {source / name: name for name in _TOKENIZER_FILES}
    if source.is_file():
        names = {source: _TOKENIZER} | {source.parent / name: name for name in _SETTINGS}
    for path, name in names.items():
        if path.is_file():
            _copy(path, folder / name, roots)


def copy_chat_template(source: Path, folder: Path, roots: DataRoots) -> None:
    """Copy a chat template into a folder, if it is still there.

    Raises:
        DataOutsideRootsError: when the file lies outside the roots.
    """
    if source.is_file():
        _copy(source, folder / _CHAT_TEMPLATE, roots)


def _copy(source: Path, target: Path, roots: DataRoots) -> None:
    with roots.open(source) as stream, target.open("wb") as copy:
        shutil.copyfileobj(stream, copy)
