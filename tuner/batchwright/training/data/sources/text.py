"""Files read as one stream of tokens."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.schemas.dataset.data_spec import TextData
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.first_reading import LARGEST_BYTES
from batchwright.training.data.foreign import ForeignFailure, lists_in_child
from batchwright.training.data.source import DataSource
from batchwright.training.data.sources.tokens import PaddedCollation, TextTokenizer, open_tokenizer, padding_id
from batchwright.workloads.base import Workload
from batchwright.workloads.reference import NextTokenWorkload

_SHORTEST_SAMPLE = 2
"""A next-token sample of one token has nothing to predict."""
_PIECE_BYTES = 2**16
_PIECES_AT_A_TIME = 64
_SECONDS = 60.0
"""Time limit of encoding so many pieces, which takes a second or two."""


class StreamSamples:
    """A stream of tokens cut into samples of ``length`` tokens; the last sample has the remainder."""

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


class TextSource(DataSource[TextData]):
    """Files, as one stream of tokens."""

    def modules(self) -> dict[str, str]:
        """Name `tokenizers`, but for bytes."""
        return {} if self.data.tokenizer == "bytes" else {"tokenizers": "tokenizer"}

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the text of files as samples of the worst-case length.

        Raises:
            SpecError: when a path matches no file, the files hold no text, or the model is not a causal language model.
        """
        data, folders = self.data, self.folders
        if not isinstance(workload, NextTokenWorkload):
            message = "`text` trains a causal language model; use `records`, `arrays`, `workload` or `synthetic`"
            raise data_problem("data.kind", message, data.kind)
        length = spec.batch.sequence_length or 0
        tokenizer = open_tokenizer(data.tokenizer, length, workload.vocabulary_size, folders)
        files = folders.matching(data.paths)
        stream = _bytes(files, folders) if data.tokenizer == "bytes" else _tokens(files, tokenizer, folders)
        if len(stream) < _SHORTEST_SAMPLE:
            raise data_problem("data.paths", "these files hold no text", ", ".join(data.paths))
        padding = padding_id(tokenizer, getattr(workload, "config", None))
        collation = PaddedCollation(padding, length if spec.compile else None, masked=False)
        return TrainingData(StreamSamples(stream, length), collation)


def _bytes(files: list[Path], folders: DataFolders) -> Tensor:
    """Read the files' bytes as tokens, with a newline between two files."""
    contents = []
    for path in files:
        with folders.open("data.paths", path) as stream:
            contents.append(stream.read(-1 if folders.reading is None else LARGEST_BYTES))  # bytes are never malformed
    content = b"\n".join(contents)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _tokens(files: list[Path], tokenizer: TextTokenizer, folders: DataFolders) -> Tensor:
    """Tokenise the files in pieces of whole lines, in a child process."""
    parts, total = [torch.empty(0, dtype=torch.int32)], sum(path.stat().st_size for path in files)
    try:
        for some in lists_in_child(partial(_encoded, files, tokenizer, folders), _PIECES_AT_A_TIME, _SECONDS, _SECONDS):
            parts += map(torch.from_numpy, some)
            if folders.reading is not None:
                folders.reading.count(min(total, (len(parts) - 1) * _PIECE_BYTES), total, "bytes")
    except ForeignFailure as failure:
        piece = next(islice(_pieces(files, folders), len(parts) - 1, None), None)
        place = ", ".join(map(str, files)) if piece is None else f"lines from {piece.line} of {piece.path}"
        raise data_problem("data.tokenizer", f"cannot encode the text: {failure}", place) from None
    return torch.cat(parts)


def _encoded(
    files: list[Path], tokenizer: TextTokenizer, folders: DataFolders, begin: int, count: int
) -> Iterator[list[npt.NDArray[np.int32]]]:
    """Yield the tokens of the pieces from number ``begin`` on, ``count`` at a time."""
    pieces = (piece.text for piece in islice(_pieces(files, folders), begin, None))
    while some := list(islice(pieces, count)):
        yield [np.array(ids, dtype=np.int32) for ids in tokenizer.encode_all(some)]


class _Piece(NamedTuple):
    path: Path
    line: int
    """Number of the first line."""
    text: str


def _pieces(files: list[Path], folders: DataFolders) -> Iterator[_Piece]:
    """Yield the files' text in pieces, with a newline between two files."""
    for number, path in enumerate(files, start=1):
        line = 1
        with folders.open("data.paths", path) as stream:
            while lines := stream.readlines(_PIECE_BYTES):
                for place, content in enumerate(lines, start=line):
                    try:
                        content.decode()
                    except UnicodeDecodeError as error:
                        raise data_problem(
                            "data.paths", f"is not UTF-8 text: {error}", f"line {place} of {path}"
                        ) from None
                yield _Piece(path, line, b"".join(lines).decode())
                line += len(lines)
        if number < len(files):
            yield _Piece(path, line, "\n")
