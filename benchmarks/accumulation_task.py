"""The model, the samples and the exact gradient of ``accumulation_exactness.py``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils.data import DataLoader, IterableDataset

from batchwright.schemas.workload import parse_spec
from batchwright.workloads.base import IGNORED_LABEL, count_labels, pad_tokens
from batchwright.workloads.build import build_workload

TARGETS = (40, 22, 30, 15, 36, 30, 20, 7, 25, 12)
"""Tokens of each sample that count: those after the first."""
MICRO_BATCH = 2
VOCABULARY = 64


class Streamed(IterableDataset[Tensor]):
    """Samples without a length."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples = samples
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return iter(self._samples)


class CausalModel(nn.Module):
    """The reference GPT; answers with the mean loss, as a tutorial's model does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": VOCABULARY}
        model = {"kind": "reference", "architecture": sizes}
        self.network = build_workload(parse_spec({"model": model, "batch": {"sequence_length": 64}})).build_model()

    def sum_and_weight(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        """Summed loss and how many tokens it was summed over, in the model's own precision."""
        logits, targets = self.network(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
        return loss_sum, float(count_labels(targets))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        """The mean over this micro-batch, and what it is made of."""
        loss_sum, weight = self.sum_and_weight(input_ids, labels)
        return {"loss": loss_sum / weight, "loss_sum": loss_sum, "weight": weight}


class CausalModelWithKeywords(CausalModel):
    """A forward pass as the HF Trainer calls it: given the window's tokens, it divides by them."""

    loss_type = "ForCausalLM"
    """As the library's own causal models have it: without it the Trainer counts each sample's first token too."""

    def forward(self, input_ids: Tensor, labels: Tensor, **keywords: Any) -> dict[str, Any]:  # noqa: ANN401 - by which the Trainer knows such a model
        """The sum over the number of tokens that the Trainer tells."""
        loss_sum, weight = self.sum_and_weight(input_ids, labels)
        items = keywords.get("num_items_in_batch")
        return {"loss": loss_sum / (weight if items is None else items)}


class RecordingSgd(torch.optim.SGD):
    """Takes note of every step: the weights before it, and the gradients it was given."""

    def __init__(self, parameters: Any) -> None:  # noqa: ANN401 - whatever an optimizer takes
        super().__init__(parameters, lr=0.05)
        self.steps: list[tuple[list[Tensor], list[Tensor]]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as its base
        """Run the closure, which may be the backward pass; record; step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [it for group in self.param_groups for it in group["params"]]
        gradients = [torch.zeros_like(it) if it.grad is None else it.grad for it in parameters]
        self.steps.append(([it.detach().clone() for it in parameters], [it.clone() for it in gradients]))
        super().step()
        return loss


@dataclass
class Task:
    """One run: fresh weights, the samples, and how they should fall into updates."""

    samples: list[Tensor]
    steps: int = 4
    epochs: int = 1
    world: int = 1
    sized: bool = True
    model: CausalModel = field(init=False)
    optimizer: RecordingSgd = field(init=False)

    def __post_init__(self) -> None:
        self.streamed = Streamed(self.samples)
        self.use(CausalModel())

    def use(self, model: CausalModel) -> None:
        """Train this one."""
        self.model, self.optimizer = model, RecordingSgd(model.parameters())

    def dataset(self) -> Any:  # noqa: ANN401 - a list has no type in common with an iterable dataset
        """All samples, with or without a length."""
        return self.samples if self.sized else self.streamed

    def loader(self, rank: int | None = None) -> DataLoader[Any]:
        """Micro-batches in order; with a rank, those of this rank."""
        share = len(self.samples) // self.world
        dataset: Any = self.dataset() if rank is None else self.samples[rank * share : (rank + 1) * share]
        return DataLoader(dataset, batch_size=MICRO_BATCH, collate_fn=collate)

    def expected(self) -> list[list[Tensor]]:
        """The samples of every update."""
        size = MICRO_BATCH * self.steps * self.world
        epoch = [self.samples[start : start + size] for start in range(0, len(self.samples), size)]
        return epoch * self.epochs

    def error(self, update: int) -> float:
        """Of the update with this number, against the one that should be in its place."""
        weights, gradients = self.optimizer.steps[update]
        missed = self.updates_made() < len(self.expected())
        samples = self.expected()[update + 1 if missed and update else update]
        return error_of(gradients, reference(weights, samples))

    def updates_made(self) -> int:
        """Number of updates in ``epochs`` passes, also where a run of a given number of steps makes more passes."""
        return len(self.optimizer.steps) * self.epochs // max(self.epochs, self.streamed.passes)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    """Pad on the right with labels that do not count."""
    return pad_tokens(samples)


def ragged_samples(count: int) -> list[Tensor]:
    """Samples of ``TARGETS`` tokens and one more; each sample draws from its own part of the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(index * 5, index * 5 + 12, (targets + 1,), generator=generator)
        for index, targets in enumerate(TARGETS[:count])
    ]


def reference(weights: list[Tensor], samples: list[Tensor]) -> list[Tensor]:
    """The gradient of the full batch's mean over tokens, in fp64."""
    model = CausalModel().double()
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value.double()
    loss_sum, weight = model.sum_and_weight(**collate(samples))
    return list(torch.autograd.grad(loss_sum / weight, list(model.parameters())))


def error_of(gradients: list[Tensor], references: list[Tensor]) -> float:
    """The largest error of a tensor, relative to its largest element."""
    return max(
        float((gradient.double() - truth).abs().max() / truth.abs().max())
        for gradient, truth in zip(gradients, references, strict=True)
    )
