"""Compare exact gradient accumulation in your own training loop with the loop of most tutorials.

A small GPT over bytes reads paragraphs of the Python standard library's own sources. The samples are sorted by length,
and the last accumulation window has fewer micro-batches. The gradients of each loop are compared with the gradient of
each window as one batch. Takes a few seconds on the CPU, and downloads nothing::

    python examples/own_loop.py
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader

from batchwright import GradientAccumulation, windows

SAMPLES, MICRO_BATCH_SIZE, STEPS = 22, 4, 4
"""Six micro-batches of 4, 4, 4, 4, 4 and 2 samples: an accumulation window of four, and one of two."""
MAX_LENGTH = 384
"""Paragraphs are truncated to this many bytes."""
IGNORED = -100
"""The target of padding, as in ``torch.nn.functional.cross_entropy``."""

Gradients = list[Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, DataLoader[Tensor]], None]


class SmallGpt(nn.Module):
    """Next-byte logits of ``(batch, length)`` ids, as ``(batch, length, 256)``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(MAX_LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits with causal attention."""
        length = ids.shape[1]
        states = self.bytes(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        logits: Tensor = self.head(self.blocks(states, mask=mask, is_causal=True))
        return logits


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the *sum* of the loss over the tokens of a batch, never the mean, and the number of tokens."""
    inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits = model(inputs)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()


# --- the two loops ---


def tutorial_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Tensor]) -> None:
    """Wrong: every micro-batch has the same weight whatever its tokens, and every window is divided by ``STEPS``."""
    for number, batch in enumerate(loader, start=1):
        loss_sum, tokens = loss(model, batch)
        (loss_sum / tokens / STEPS).backward()  # type: ignore[no-untyped-call] # torch's own
        if number % STEPS == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def exact_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Tensor]) -> None:
    """Right: every token of a window has the same weight."""
    accumulation = GradientAccumulation(model, optimizer)
    for micro_batches in windows(loader, STEPS):
        accumulation.update(micro_batches, loss)


# --- comparison ---


def paragraphs(seed: int) -> list[Tensor]:
    """Sample paragraphs of the standard library's sources, sorted by length, as loaders do to save padding."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [text.strip() for path in sources for text in path.read_bytes().split(b"\n\n")]
    chosen = random.Random(seed).sample([text for text in texts if len(text) > 1], SAMPLES)
    return [torch.tensor(list(text[:MAX_LENGTH])) for text in sorted(chosen, key=len)]


def collate(samples: Sequence[Tensor]) -> Tensor:
    """Stack paragraphs, padded to the longest."""
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=IGNORED)


def gradients_of(model: nn.Module) -> Gradients:
    """Copy the gradient of every parameter."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def full_batch_gradients(model: nn.Module, batch: Tensor) -> Gradients:
    """Return the gradient of all samples as one batch."""
    loss_sum, tokens = loss(model, batch)
    (loss_sum / tokens).backward()  # type: ignore[no-untyped-call] # torch's own
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients


def error(gradients: Gradients, reference: Gradients) -> float:
    """Return the largest relative error of a parameter's gradient."""
    pairs = zip(gradients, reference, strict=True)
    return max(float((value - expected).abs().max() / expected.abs().max()) for value, expected in pairs)


def steps_of(loop: Loop, model: nn.Module, loader: DataLoader[Tensor]) -> list[Gradients]:
    """Return the gradients of a loop at each step. The weights do not change: the learning rate is 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps: list[Gradients] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(gradients_of(model)))
    loop(model, optimizer, loader)
    return steps


def tokens_of(window: list[Tensor]) -> str:
    """List the number of predicted tokens of each micro-batch of a window."""
    batches = [window[start : start + MICRO_BATCH_SIZE] for start in range(0, len(window), MICRO_BATCH_SIZE)]
    return ", ".join(str(sum(len(sample) - 1 for sample in batch)) for batch in batches)


def main() -> None:
    """Run both loops over the same windows, and print their errors against the full batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    model, samples = SmallGpt(), paragraphs(seed)
    loader: DataLoader[Tensor] = DataLoader(samples, MICRO_BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type] # a list is a map-style dataset
    wrong, right = steps_of(tutorial_loop, model, loader), steps_of(exact_loop, model, loader)
    print("Error of the gradient against that of the whole window at once:")
    for number, window in enumerate(windows(samples, STEPS * MICRO_BATCH_SIZE)):
        reference = full_batch_gradients(model, collate(window))
        print(f"window of {len(window)} samples, micro-batches of {tokens_of(window)} tokens")
        print(f"  loss / steps          {error(wrong[number], reference):.1e}")
        print(f"  GradientAccumulation  {error(right[number], reference):.1e}")


if __name__ == "__main__":
    main()
