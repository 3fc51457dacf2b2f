"""Files read as one stream of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tuner.specs import TextData, WorkloadSpec
from tuner.training.data.base import TrainingData, data_problem
from tuner.training.data.files import matching_files
from tuner.workloads.base import Workload
from tuner.workloads.reference import NextTokenWorkload

_BYTE_VALUES = 256
_SHORTEST_SAMPLE = 2
"""A next-token sample of one token has nothing to predict."""


class ByteSamples:
    """A stream of bytes cut into samples of ``length`` tokens; the last one keeps what is left."""

    def __init__(self, stream: Tensor, length: int) -> None:
        self._stream = stream
        self._length = length
        whole, rest = divmod(len(stream), length)
        self._count = whole + (rest >= _SHORTEST_SAMPLE)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._stream[index * self._length : (index + 1) * self._length].long()


def text_data(data: TextData, spec: WorkloadSpec, workload: Workload) -> TrainingData:
    """The text of files as samples of the worst-case length.

    Raises:
        SpecError: when a path matches no file, there is no text in them, or the model is no causal language model.
    """
    if not isinstance(workload, NextTokenWorkload):
        message = "`text` trains a causal language model; use `workload` or `synthetic`"
        raise data_problem("data.kind", message, data.kind)
    if workload.vocabulary_size < _BYTE_VALUES:
        raise data_problem("data.tokenizer", f"bytes need 256 token ids, the model has {workload.vocabulary_size}")
    content = b"\n".join(path.read_bytes() for path in matching_files(data.paths))
    if len(content) < _SHORTEST_SAMPLE:
        raise data_problem("data.paths", "these files hold no text", ", ".join(data.paths))
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return TrainingData(ByteSamples(stream, spec.batch.sequence_length or 0), workload.collate)
