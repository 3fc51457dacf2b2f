"""Arrays in a file, with the samples along the first dimension."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchwright.schemas.dataset.data_spec import ArraysData
from batchwright.schemas.workload import Gpt, ReferenceModel, TransformersModel, WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.first_reading import LARGEST_BYTES, TimeIsUpError
from batchwright.training.data.foreign import ForeignFailure, foreign_errors, try_in_child
from batchwright.training.data.source import DataSource
from batchwright.training.micro_batches.rng_state import preserved_random_state
from batchwright.workloads.base import IGNORED_LABEL, Workload
from batchwright.workloads.reference import NextTokenWorkload

_MASK = "attention_mask"
_MASKED = ("input_ids", "input_values", "input_features")
"""Inputs that a mask may belong to, with the samples and the positions first."""
_SECONDS = 3600.0
"""Time limit of reading the arrays."""
_Arrays: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class ArraySamples:
    """The slices of arrays along their first dimension."""

    arrays: Mapping[str, Tensor]
    """Arrays of the file by the batch's keys."""
    types: Mapping[str, torch.dtype]
    """Type of each array in a sample."""

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: array[index].to(self.types[name]) for name, array in self.arrays.items()}


class ArraysSource(DataSource[ArraysData]):
    """Arrays in a file."""

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the arrays of a file as samples of any model with such batches.

        Raises:
            SpecError: when the file cannot be read, or an array is missing or does not fit the model's batch.
        """
        data, folders = self.data, self.folders
        with preserved_random_state():
            example = workload.make_batch(1)
        if not isinstance(example, dict) or not all(isinstance(value, Tensor) for value in example.values()):
            message = "needs a model whose batch is a dict of tensors; use `workload`"
            raise data_problem("data.kind", message, data.kind)
        arrays = _chosen(data, _read(data, folders), example, causal=isinstance(workload, NextTokenWorkload))
        for name, array in arrays.items():
            _check_array(name, array, example[name])
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1 or not all(lengths.values()):
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise data_problem("data.path", "must have arrays of the same number of samples, at least one", found)
        for name, (least, count) in _ranges(spec, workload).items():
            if name in arrays:
                _check_range(name, arrays[name], least, count)
        types = {name: torch.float32 if array.is_floating_point() else torch.int64 for name, array in arrays.items()}
        return TrainingData(ArraySamples(arrays, types), default_collate)


def _read(data: ArraysData, folders: DataFolders) -> dict[str, Tensor]:
    """Read the arrays, first in a child process: a few bytes may unpack to more than the memory has."""
    if folders.reading is not None:
        with folders.open("data.path", data.path) as stream:
            if os.fstat(stream.fileno()).st_size > LARGEST_BYTES:
                raise TimeIsUpError(f"{data.path} is too large")
    try:
        try_in_child(partial(_arrays, data, folders), _SECONDS)
    except (ForeignFailure, MemoryError) as failure:
        raise data_problem("data.path", f"cannot be read: {failure}", data.path) from None
    with foreign_errors("data.path", lambda: data.path):
        return _arrays(data, folders)


def _arrays(data: ArraysData, folders: DataFolders) -> dict[str, Tensor]:
    with folders.open("data.path", data.path) as stream:
        if data.path.endswith(".safetensors"):  # memory-mapped through the open descriptor
            return safetensors.torch.load_file(f"/proc/self/fd/{stream.fileno()}")
        with np.load(stream, allow_pickle=False) as archive:
            return {name: torch.from_numpy(_native(archive[name])) for name in archive.files}


def _native(array: np.ndarray) -> np.ndarray:
    """Convert to the native byte order, and unsigned types wider than a byte to int64, as torch supports few others."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _chosen(data: ArraysData, found: dict[str, Tensor], example: dict[str, Tensor], *, causal: bool) -> _Arrays:
    """Select the arrays by the batch's keys. A missing mask and missing labels are derived from the token ids."""
    unknown = sorted(set(data.names) - set(example))
    if unknown:
        raise data_problem("data.names", f"must name keys of the model's batch: {', '.join(example)}", unknown[0])
    arrays = {key: found[name] for key in example if (name := data.names.get(key, key)) in found}
    if (ids := next((arrays[name] for name in _MASKED if name in arrays), None)) is not None:
        ones = torch.ones((), dtype=torch.int64).expand(ids.shape[:2])
        made = {_MASK: ones} | ({"labels": ids} if causal else {})
        arrays = {key: value for key, value in made.items() if key in example and key not in data.names} | arrays
    for key in example:
        if key not in arrays:
            field, name = (f"data.names.{key}", data.names[key]) if key in data.names else ("data.path", key)
            message = f"has no array `{name}` for the batch's `{key}`; it has {', '.join(found) or 'none'}"
            raise data_problem(field, message, data.path)
    return {key: arrays[key] for key in example}


def _check_array(name: str, array: Tensor, example: Tensor) -> None:
    wanted = "floating-point numbers" if example.is_floating_point() else "integers"
    integer = not array.is_floating_point() and not array.is_complex() and array.dtype is not torch.bool
    if not (array.is_floating_point() if example.is_floating_point() else integer):
        raise _array_problem(name, f"must hold {wanted}", str(array.dtype).removeprefix("torch."))
    shape = tuple(example.shape[1:])
    if not array.dim() or tuple(array.shape[1:]) != shape:
        message = f"must be shaped (samples, {', '.join(map(str, shape))}), as `batch` and the model require"
        raise _array_problem(name, message.replace(", )", ")"), tuple(array.shape))


def _check_range(name: str, array: Tensor, least: int, count: int) -> None:
    """Check that every value is in 0 to ``count`` - 1, or equals ``least`` if that is negative."""
    smallest, largest = (int(value) for value in torch.aminmax(array))
    if largest < count and smallest >= least and (smallest >= 0 or not ((array < 0) & (array != least)).any()):
        return
    ignored = f", or {least} to ignore" if least < 0 else ""
    raise _array_problem(name, f"must hold numbers from 0 to {count - 1}{ignored}", f"{smallest} to {largest}")


def _array_problem(name: str, message: str, value: object) -> Exception:
    return data_problem(f"data.path ({name})", message, value)


def _ranges(spec: WorkloadSpec, workload: Workload) -> dict[str, tuple[int, int]]:
    """Lowest value, and number of values from 0, for the keys whose values are classes or token ids."""
    model, config = spec.model, getattr(workload, "config", None)
    if isinstance(model, ReferenceModel):
        architecture = model.architecture
        if isinstance(architecture, Gpt):
            return _token_ranges(architecture.vocabulary_size, architecture.vocabulary_size)
        return {"labels": (0, architecture.classes)}
    if not isinstance(model, TransformersModel) or config is None:
        return {}
    if model.task == "image-classification":
        return {"labels": (IGNORED_LABEL, config.num_labels)}
    vocabulary_size = getattr(config, "text_config", config).vocab_size
    classes = config.num_labels if model.task.endswith("-classification") else vocabulary_size
    return _token_ranges(vocabulary_size, classes)


def _token_ranges(vocabulary_size: int, labels: int) -> dict[str, tuple[int, int]]:
    ids = (0, vocabulary_size)
    return {"input_ids": ids, "decoder_input_ids": ids, _MASK: (0, 2), "labels": (IGNORED_LABEL, labels)}
