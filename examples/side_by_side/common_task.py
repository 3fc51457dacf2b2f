"""The model, the samples and the memory limit that the scripts of this folder share.

A small GPT over bytes reads 125 paragraphs of the Python standard library's sources, of up to 512 bytes, in random
order. Micro-batches are padded to 512 bytes, so that samples differ in the bytes that count for the loss, and not in
the memory that they need. With ``--long-sample`` a sample late in the epoch is twice as long.

The C library reads the settings of its allocator when a process starts. A script of this folder therefore starts anew
with those of Batchwright's probes: without them, freed memory is kept, and counts against the limit.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.workloads.preload import import_early, late_imports

EFFECTIVE_BATCH_SIZE = 50
"""Samples of one optimizer update."""
MEMORY_LIMIT_BYTES = 128 * 1024**2
LENGTH = 512
"""Bytes of the longest sample."""
SAMPLES = 125
"""Two updates of 50 samples and one of 25."""
LONG_SAMPLE = 110
"""Index of the sample that ``--long-sample`` makes twice as long."""
IGNORED = -100
"""The target of padding, as in ``torch.nn.functional.cross_entropy``."""

if Path(sys.argv[0]).resolve().parent == Path(__file__).parent and CPU_ENVIRONMENT.items() - os.environ.items():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | CPU_ENVIRONMENT)  # noqa: S606 - this script


class SmallGpt(nn.Module):
    """Next-byte logits of ``(batch, length)`` ids, as ``(batch, length, 256)``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(2 * LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits with causal attention."""
        length = ids.shape[1]
        states = self.bytes(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        logits: Tensor = self.head(self.blocks(states, mask=mask, is_causal=True))
        return logits


def build_model() -> SmallGpt:
    """Build the model, with the same weights each time."""
    torch.manual_seed(0)
    return SmallGpt()


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the bytes of a batch, and their number."""
    logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()


class Paragraphs(Dataset[Tensor]):
    """Distinct paragraphs of the standard library's sources as ids, ``(length,)`` each."""

    def __init__(self, *, has_long_sample: bool) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = {text.strip()[:LENGTH] for path in sources for text in path.read_bytes().split(b"\n\n")}
        self._texts = random.Random(0).sample(sorted(text for text in texts if len(text) > 1), SAMPLES)
        if has_long_sample:
            self._texts[LONG_SAMPLE] = b"\n\n".join(self._texts[LONG_SAMPLE:])[: 2 * LENGTH]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(list(self._texts[index]))


def samples() -> Paragraphs:
    """Return all samples, one of them longer if the command line says so."""
    return Paragraphs(has_long_sample="--long-sample" in sys.argv)


def collate(batch: list[Tensor]) -> Tensor:
    """Stack samples, padded to ``LENGTH`` bytes or to the longest above it."""
    padded = nn.utils.rnn.pad_sequence([*batch, torch.zeros(LENGTH, dtype=torch.int64)], True, IGNORED)
    return padded[:-1]


def loader(batch_size: int) -> DataLoader[Tensor]:
    """Load the samples in order, ``batch_size`` at a time."""
    return DataLoader(samples(), batch_size, collate_fn=collate)


def longest_batch(size: int) -> Tensor:
    """Return ``size`` random samples that are as long as the longest of training."""
    return torch.randint(0, 256, (size, LENGTH))


def limit_memory() -> MemoryDevice:
    """Limit what this process may allocate from now on, as in Batchwright's probes on a CPU: a card of that size."""
    import_early(late_imports())
    memory = open_device("cpu")
    memory.limit(MEMORY_LIMIT_BYTES)
    return memory
