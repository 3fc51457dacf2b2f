"""Write a trained transformers model in the format of ``save_pretrained``, for ``from_pretrained`` to load."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.system.data_roots import DataRoots

_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_SETTINGS = (_CHAT_TEMPLATE, _TOKENIZER_SETTINGS)
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
    _TOKENIZER_SETTINGS,
    "vocab.json",
    "vocab.txt",
)
"""The files that tokenizers and processors of transformers write."""
_OTHER_TOKENIZERS = tuple(set(_TOKENIZER_FILES) - {_CHAT_TEMPLATE, "preprocessor_config.json", "processor_config.json"})
"""The files of a tokenizer that another one replaces."""


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


def copy_files_of_model(source: Path, folder: Path, roots: DataRoots, *, generates: bool) -> None:
    """Copy the files of a pretrained model's tokenizer and processor, those that there are.

    Args:
        source: the folder of the model.
        folder: an existing folder.
        roots: the folders that may be read.
        generates: whether to copy the generation config too: the tokens at which it stops, and how it samples.

    Raises:
        DataOutsideRootsError: when a file links to outside the roots.
    """
    _copy_those_of((*_TOKENIZER_FILES, *((_GENERATION,) if generates else ())), source, folder, roots)


def copy_tokenizer(source: Path, folder: Path, roots: DataRoots) -> None:
    """Copy a tokenizer in place of one that is there, so that `AutoTokenizer` makes the tokens of the run.

    Without settings transformers takes the class of the model's type, which replaces parts of the `tokenizer.json`
    (the pre-tokenizer of a GPT-2): they name the class that takes the file as it is.

    Args:
        source: a `tokenizer.json`, with its settings beside it.
        folder: an existing folder.
        roots: the folders that may be read.

    Raises:
        DataOutsideRootsError: when a file links to outside the roots.
    """
    if not source.is_file():
        return
    for name in _OTHER_TOKENIZERS:
        (folder / name).unlink(missing_ok=True)
    _copy(source, folder / _TOKENIZER, roots)
    _copy_those_of(_SETTINGS, source.parent, folder, roots)
    if not (folder / _TOKENIZER_SETTINGS).exists():
        settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / _TOKENIZER_SETTINGS).write_text(f"{settings}\n", encoding="utf-8")


def copy_chat_template(source: Path, folder: Path, roots: DataRoots) -> None:
    """Copy a chat template into a folder, if it is still there.

    Raises:
        DataOutsideRootsError: when the file lies outside the roots.
    """
    if source.is_file():
        _copy(source, folder / _CHAT_TEMPLATE, roots)


def _copy_those_of(names: Iterable[str], source: Path, folder: Path, roots: DataRoots) -> None:
    for name in names:
        if (source / name).is_file():
            _copy(source / name, folder / name, roots)


def _copy(source: Path, target: Path, roots: DataRoots) -> None:
    with roots.open(source) as stream, target.open("wb") as copy:
        shutil.copyfileobj(stream, copy)
