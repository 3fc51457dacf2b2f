"""Exact gradient accumulation in a training loop of your own, beside the loop of most tutorials.

A small GPT over bytes reads paragraphs of the Python standard library's own sources: samples of unlike lengths, those
of like length together, and a last window that is short of micro-batches. For each window the gradient that each loop
steps with is compared with that of the window as one batch. Takes a few seconds on the CPU, and downloads nothing::

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

from tuner.training.accumulation.engine import GradientAccumulation, windows

SAMPLES, MICRO_BATCH_SIZE, STEPS = 22, 4, 4
"""Six micro-batches of 4, 4, 4, 4, 4 and 2 samples: a window of four, and one of two."""
LONGEST = 384
"""Bytes of a paragraph that are read."""
IGNORED = -100
"""The target of padding, as in ``torch.nn.functional.cross_entropy``."""

Gradients = list[Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, DataLoader[Tensor]], None]


class SmallGpt(nn.Module):
    """Next-byte logits of ``(batch, length)`` ids, as ``(batch, length, 256)``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(LONGEST, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Each position sees those before it."""
        length = ids.shape[1]
        states = self.bytes(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        logits: Tensor = self.head(self.blocks(states, mask=mask, is_causal=True))
        return logits


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The *sum* over the batch's tokens, and how many there are: never the mean."""
    inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits = model(inputs)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()


# --- the two loops ---


def tutorial_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Tensor]) -> None:
    """Wrong: each micro-batch counts alike, however few tokens it has, and every window as if it had ``STEPS``."""
    for number, batch in enumerate(loader, start=1):
        loss_sum, tokens = loss(model, batch)
        (loss_sum / tokens / STEPS).backward()  # type: ignore[no-untyped-call] # torch's own
        if number % STEPS == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def exact_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Tensor]) -> None:
    """Right: each token of a window counts alike."""
    accumulation = GradientAccumulation(model, optimizer)
    for micro_batches in windows(loader, STEPS):
        accumulation.update(micro_batches, loss)


# --- what they are compared by ---


def paragraphs(seed: int) -> list[Tensor]:
    """Paragraphs of the standard library's sources, by length, as loaders group them to save padding."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [text.strip() for path in sources for text in path.read_bytes().split(b"\n\n")]
    chosen = random.Random(seed).sample([text for text in texts if len(text) > 1], SAMPLES)
    return [torch.tensor(list(text[:LONGEST])) for text in sorted(chosen, key=len)]


def collate(samples: Sequence[Tensor]) -> Tensor:
    """Paragraphs side by side, padded to the longest."""
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=IGNORED)


def gradients_of(model: nn.Module) -> Gradients:
    """A copy of every parameter's gradient."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def full_batch_gradients(model: nn.Module, batch: Tensor) -> Gradients:
    """The gradient of all samples at once."""
    loss_sum, tokens = loss(model, batch)
    (loss_sum / tokens).backward()  # type: ignore[no-untyped-call] # torch's own
    found = gradients_of(model)
    model.zero_grad()
    return found


def error(found: Gradients, reference: Gradients) -> float:
    """The largest relative error of a parameter's gradient."""
    pairs = zip(found, reference, strict=True)
    return max(float((mine - true).abs().max() / true.abs().max()) for mine, true in pairs)


def steps_of(loop: Loop, model: nn.Module, loader: DataLoader[Tensor]) -> list[Gradients]:
    """The gradients that a loop makes its steps with. The weights stay, so that each window is seen with the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps: list[Gradients] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(gradients_of(model)))
    loop(model, optimizer, loader)
    return steps


def tokens_of(window: list[Tensor]) -> str:
    """The tokens to predict in each micro-batch of a window."""
    batches = [window[start : start + MICRO_BATCH_SIZE] for start in range(0, len(window), MICRO_BATCH_SIZE)]
    return ", ".join(str(sum(len(sample) - 1 for sample in batch)) for batch in batches)


def main() -> None:
    """Run both loops over the same windows, and print how far each is from the full batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    model, samples = SmallGpt(), paragraphs(seed)
    loader: DataLoader[Tensor] = DataLoader(samples, MICRO_BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type] # a list will do
    wrong, right = steps_of(tutorial_loop, model, loader), steps_of(exact_loop, model, loader)
    print("Error of the gradient against that of the whole window at once:")
    for number, window in enumerate(windows(samples, STEPS * MICRO_BATCH_SIZE)):
        reference = full_batch_gradients(model, collate(window))
        print(f"window of {len(window)} samples, micro-batches of {tokens_of(window)} tokens")
        print(f"  loss / steps          {error(wrong[number], reference):.1e}")
        print(f"  GradientAccumulation  {error(right[number], reference):.1e}")


if __name__ == "__main__":
    main()
