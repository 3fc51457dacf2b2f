"""Pack documents into sequences: no token is padded that another document could take.

The packing is a function of the documents, their order and the length of a sequence alone: it depends neither on the
seed, nor on the ranks, the micro-batches or a resume. The seed orders the sequences of an epoch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from tuner.schemas.dataset import Packing
from tuner.workloads.base import IGNORED_LABEL

_FEWEST_TOKENS = 2
"""A document of one token has none to predict."""


@dataclass(frozen=True)
class PackedSamples:
    """Sequences of documents, sliced from the tokens of all documents on access.

    A sample has ``input_ids``, ``labels``, of which the first of each document is ignored, and ``position_ids``, which
    restart from 0 at each document: int64 ``(length,)``.
    """

    stream: Tensor
    """Tokens of all documents, int32 ``(tokens,)``."""
    pieces: Tensor
    """First token and end of each piece in the stream, int64 ``(pieces, 2)``: a whole document or a part of one."""
    bounds: Tensor
    """The first piece of each sequence, and the number of pieces, int64 ``(sequences + 1,)``."""
    documents: int
    """Number of documents."""
    share: float
    """Share of the positions of full sequences that hold tokens."""
    unpacked_share: float
    """The same share with one document in each sequence, longer ones cut."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, end = self.bounds[index : index + 2].tolist()
        pieces = [self.stream[start:stop].long() for start, stop in self.pieces[first:end].tolist()]
        labels = [torch.cat([piece.new_tensor([IGNORED_LABEL]), piece[1:]]) for piece in pieces]
        positions = [torch.arange(len(piece)) for piece in pieces]
        return {"input_ids": torch.cat(pieces), "labels": torch.cat(labels), "position_ids": torch.cat(positions)}


def pack(documents: Iterable[list[int]], length: int, packing: Packing) -> PackedSamples:
    """Pack the token ids of documents into sequences of at most ``length`` tokens.

    Documents of less than two tokens, which have none to predict, are left out.

    Args:
        documents: token ids of each document; with `bfd` at most ``length``.
        length: tokens of a sequence.
        packing: see ``BatchSpec.packing``.
    """
    parts = [np.empty(0, dtype=np.int32)]
    parts += [np.asarray(ids, dtype=np.int32) for ids in documents if len(ids) >= _FEWEST_TOKENS]
    ends = np.cumsum([len(part) for part in parts])  # the first is that of the empty part
    match packing:
        case "bfd":
            sequences = best_fit_decreasing(np.diff(ends).tolist(), length)
            order = np.array([document for sequence in sequences for document in sequence], dtype=np.int64)
            pieces = np.stack([ends[:-1][order], ends[1:][order]], axis=1)
            bounds = np.cumsum([0, *map(len, sequences)])
        case "wrapped":
            cuts = np.union1d(ends, np.arange(0, ends[-1], length))
            pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
            bounds = np.append(np.searchsorted(cuts, np.arange(0, ends[-1], length)), len(pieces))
        case _:
            assert_never(packing)
    sizes = np.diff(ends)
    return PackedSamples(
        stream=torch.from_numpy(np.concatenate(parts)),
        pieces=torch.from_numpy(pieces),
        bounds=torch.from_numpy(bounds),
        documents=len(sizes),
        share=float(ends[-1] / max(1, len(bounds) - 1) / length),
        unpacked_share=float(np.minimum(sizes, length).sum() / max(1, len(sizes)) / length),
    )


def best_fit_decreasing(sizes: list[int], room: int) -> list[list[int]]:
    """Divide items into bins of ``room``: each item, the largest first, into the fullest bin that has room for it.

    Items of one size keep their order, and bins are in the order in which they were opened. Takes at most 11/9 of the
    fewest bins, and four more (Johnson et al., 1974).

    Args:
        sizes: sizes of the items, from 1 to ``room``.
        room: size of a bin.

    Returns:
        The numbers of the items of each bin.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    left: list[int] = []  # the keys of `with_room`, increasing
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found = bisect_left(left, sizes[item])
        if found == len(left):
            chosen, rest = len(bins), room
            bins.append([])
        else:
            rest = left[found]
            chosen = with_room[rest].pop()
            if not with_room[rest]:
                del with_room[rest], left[found]
        bins[chosen].append(item)
        rest -= sizes[item]
        if rest not in with_room:
            with_room[rest] = []
            insort(left, rest)
        with_room[rest].append(chosen)
    return bins
