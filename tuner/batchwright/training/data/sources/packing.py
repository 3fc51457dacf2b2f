"""Pack documents into sequences: no token is padded that another document could take.

The packing is a function of the documents, their order and the length of a sequence alone: it depends neither on the
seed, nor on the ranks, the micro-batches or a resume. The seed orders the sequences of an epoch.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.schemas.dataset.batch_spec import Packing
from batchwright.training.data.sources.tokens import TokenSequences, with_labels
from batchwright.workloads.base import IGNORED_LABEL

Integers: TypeAlias = npt.NDArray[np.int64]
"""An array of int64."""
_FEWEST_TOKENS = 2
"""A document of one token has none to predict."""


@dataclass(frozen=True)
class PackedSamples:
    """Sequences of documents, sliced from the tokens of all documents on access.

    A sample has ``input_ids``, ``labels``, of which the first of each document is ignored, and ``position_ids``, which
    restart from 0 at each document: int64 ``(length,)``.
    """

    stream: Tensor
    """Tokens of all documents, int32 ``(tokens,)``; those that are not learned as their bitwise complements."""
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
        tokens, places = torch.cat(pieces), torch.cat([torch.arange(len(piece)) for piece in pieces])
        sample = with_labels(tokens)
        return {**sample, "labels": sample["labels"].masked_fill(places == 0, IGNORED_LABEL), "position_ids": places}


def pack(documents: Iterable[list[int]], length: int, packing: Packing) -> PackedSamples:
    """Pack the token ids of documents into sequences of at most ``length`` tokens.

    Documents of less than two tokens, which have none to predict, are left out.

    Args:
        documents: token ids of each document, with `bfd` at most ``length``; the bitwise complement (``~id``) of one
            that is not learned.
        length: tokens of a sequence.
        packing: see ``BatchSpec.packing``.
    """
    kept = TokenSequences.of(ids for ids in documents if len(ids) >= _FEWEST_TOKENS)
    counts, ends = kept.lengths.numpy(), kept.ends.numpy()
    match packing:
        case "bfd":
            order, bounds = best_fit_decreasing(counts, length)
            pieces = np.stack([ends[:-1][order], ends[1:][order]], axis=1)
        case "wrapped":
            cuts = np.union1d(ends, np.arange(0, ends[-1], length))
            pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
            bounds = np.append(np.searchsorted(cuts, np.arange(0, ends[-1], length)), len(pieces))
        case _:
            assert_never(packing)
    return PackedSamples(
        stream=kept.stream,
        pieces=torch.from_numpy(pieces),
        bounds=torch.from_numpy(bounds),
        documents=len(counts),
        share=float(ends[-1] / max(1, len(bounds) - 1) / length),
        unpacked_share=float(np.minimum(counts, length).sum() / max(1, len(counts)) / length),
    )


def best_fit_decreasing(sizes: Integers, room: int) -> tuple[Integers, Integers]:
    """Divide items into bins of ``room``: each item, the largest first, into the fullest bin that has room for it.

    Items of one size keep their order, and bins are in the order in which they were opened. Takes at most 11/9 of the
    fewest bins, and four more (Johnson et al., 1974).

    Args:
        sizes: sizes of the items, from 1 to ``room``, int64 ``(items,)``.
        room: size of a bin.

    Returns:
        The numbers of the items, bin by bin, int64 ``(items,)``; and the place of the first item of each bin, and the
        number of items, int64 ``(bins + 1,)``.
    """
    by_size = np.argsort(-sizes, kind="stable")
    chosen, bins = array("q"), 0
    with_room: dict[int, array[int]] = {}
    left: list[int] = []  # the keys of `with_room`, increasing
    for size in map(int, sizes[by_size]):
        found = bisect_left(left, size)
        if found == len(left):
            bin_, rest, bins = bins, room, bins + 1
        else:
            rest = left[found]
            bin_ = with_room[rest].pop()
            if not with_room[rest]:
                del with_room[rest], left[found]
        chosen.append(bin_)
        rest -= size
        if rest not in with_room:
            with_room[rest] = array("q")
            insort(left, rest)
        with_room[rest].append(bin_)
    bin_of = np.asarray(chosen)
    return by_size[np.argsort(bin_of, kind="stable")], np.append(0, np.cumsum(np.bincount(bin_of, minlength=bins)))
