"""How far the gradient of an accumulated update is from the full batch's: ours, Accelerate, HF Trainer, Lightning.

python benchmarks/accumulation_exactness.py [--output benchmarks/results/accumulation_exactness.json]

A small causal language model in fp32 over samples of unequal length. Each contender trains by its framework's own,
documented means; an optimizer that records takes note of the weights and of the gradient it is given. The error of an
update is the largest, over all tensors, of max|gradient - reference| / max|reference|, where the reference is the
gradient in fp64 of the mean over all tokens of the samples that should be in that update, at the same weights.

- A: 8 samples, 4 micro-batches of 2 with 62, 45, 66 and 27 tokens, one update.
- B: two epochs of 10 samples: the second window of each has 1 micro-batch where 4 are wanted. The error is that of the
  first epoch's second update; where there was none, that of the next one, with what it has from the epoch before.
- C: 7 samples, micro-batches of 2, 2, 2 and 1, one update.
- Two ranks: the samples of A over two processes (gloo), 2 micro-batches of 2 on each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tuner.hardware.inventory import cpu
from tuner.planning.fingerprint import installed_versions
from tuner.schemas.workload import parse_spec
from tuner.training.accumulation.collectives import Ranks, join_ranks
from tuner.training.accumulation.engine import GradientAccumulation, split_batch, windows
from tuner.workloads.base import IGNORED_LABEL, count_labels, pad_tokens, summed_cross_entropy
from tuner.workloads.build import build_workload

TARGETS = (40, 22, 30, 15, 36, 30, 20, 7, 25, 12)
"""Tokens of each sample that count: those after the first."""
MICRO_BATCH = 2
VOCABULARY = 64


# --- what is trained ---


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
    """The same as HF Trainer would have it: told the window's tokens, it divides by them."""

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
        """Micro-batches in order; those of one rank, if told one."""
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
        """In ``epochs`` passes over the samples; a run told how many steps to make makes more passes if need be."""
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


# --- the contenders: each trains ``task.model`` with ``task.optimizer`` ---


def naive(task: Task, *, steps_at_the_end: bool = True) -> None:
    """The tutorials' loop: the mean of each micro-batch over the number of accumulation steps."""
    for _ in range(task.epochs):
        loader = task.loader()
        for index, batch in enumerate(loader):
            (task.model(**batch)["loss"] / task.steps).backward()
            if (index + 1) % task.steps == 0 or (steps_at_the_end and index + 1 == len(loader)):
                task.optimizer.step()
                task.optimizer.zero_grad()


def naive_without_end(task: Task) -> None:
    """The same, where the loop does not look for the end of an epoch."""
    naive(task, steps_at_the_end=False)


def accelerate(task: Task) -> None:
    """https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation."""
    from accelerate import Accelerator  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.steps)
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer, task.loader())
    for _ in range(task.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()


def lightning(task: Task) -> None:
    """Trainer(accumulate_grad_batches=...), with automatic optimization."""
    import lightning as pl  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    class Module(pl.LightningModule):  # type: ignore[misc,unused-ignore] # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    pl.Trainer(
        accelerator="cpu",
        devices=task.world,
        strategy="ddp" if task.world > 1 else "auto",
        max_epochs=task.epochs,
        accumulate_grad_batches=task.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), task.loader())


def trainer_with_keywords(task: Task) -> None:
    """HF Trainer and a model that takes ``**kwargs``, and so learns the number of tokens in the window."""
    task.use(CausalModelWithKeywords())
    trainer_without_keywords(task)


def trainer_without_keywords(task: Task) -> None:
    """HF Trainer and a model that takes no ``**kwargs``."""
    from transformers import PrinterCallback, Trainer, TrainingArguments  # noqa: PLC0415 - slow to import

    updates = len(task.expected())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=task.epochs,
            max_steps=-1 if task.sized else updates,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=task.steps,
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            ddp_backend="gloo" if task.world > 1 else None,
        )
        trainer = Trainer(task.model, arguments, collate, task.dataset(), optimizers=(task.optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def ours(task: Task) -> None:
    """Ours: a loss as a sum and its weight, the loader in windows."""
    ranks = join_ranks(torch.device("cpu"))
    accumulation = GradientAccumulation(task.model, task.optimizer, ranks=ranks)
    for _ in range(task.epochs):
        for window in windows(task.loader(ranks.rank if ranks.size > 1 else None), task.steps):
            accumulation.update(window, lambda model, batch: _pair(model(**batch)))


def _pair(answer: dict[str, Any]) -> tuple[Tensor, float]:
    return answer["loss_sum"], answer["weight"]


def _by_hand_over_ranks(task: Task, divisor: Callable[[float, float, float], float]) -> None:
    """DistributedDataParallel with ``no_sync``, and each sum divided by what ``divisor`` makes of the tokens."""
    join_ranks(torch.device("cpu"))
    model = DistributedDataParallel(task.model)
    batches = list(task.loader(dist.get_rank()))
    tokens = [float(count_labels(batch["labels"][:, 1:])) for batch in batches]
    total = torch.tensor(sum(tokens))
    dist.all_reduce(total)
    for index, (batch, weight) in enumerate(zip(batches, tokens, strict=True)):
        with nullcontext() if index + 1 == len(batches) else model.no_sync():
            (model(**batch)["loss_sum"] / divisor(weight, float(total), task.steps)).backward()
    task.optimizer.step()


def naive_over_ranks(task: Task) -> None:
    """The tutorials' loop on ranks: a mean of means of means."""
    _by_hand_over_ranks(task, lambda weight, _total, steps: weight * steps)


def without_world_size(task: Task) -> None:
    """Tokens of all ranks are known, but not that DistributedDataParallel divides by the number of ranks."""
    _by_hand_over_ranks(task, lambda _weight, total, _steps: total)


def with_world_size(task: Task) -> None:
    """Right by hand."""
    _by_hand_over_ranks(task, lambda _weight, total, _steps: total / task.world)


def trainer_without_length(task: Task) -> None:
    """HF Trainer, a model that takes ``**kwargs``, and a dataset without ``__len__``."""
    task.sized = False
    trainer_with_keywords(task)


ALONE: dict[str, Callable[[Task], None]] = {
    "naive loop, steps at an epoch's end": naive,
    "naive loop, does not": naive_without_end,
    "accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer, model takes **kwargs": trainer_with_keywords,
    "HF Trainer, model without": trainer_without_keywords,
    "HF Trainer, dataset without a length": trainer_without_length,
    "ours": ours,
}
OVER_RANKS: dict[str, Callable[[Task], None]] = {
    "naive loop in DDP": naive_over_ranks,
    "DDP, tokens without the world size": without_world_size,
    "DDP, tokens with the world size": with_world_size,
    "accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer, model takes **kwargs": trainer_with_keywords,
    "HF Trainer, model without": trainer_without_keywords,
    "ours": ours,
}


# --- the published results, by our engine ---


def published_regression(micro_batch: int) -> list[float]:
    """For x = 1..8, y = 2x, weight 0, mean squared error, SGD with rate 0.02: 2.04000 after one update."""
    x = torch.arange(1.0, 9.0)[:, None]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.02))
    accumulation.update(split_batch((x, 2 * x), micro_batch), loss)
    return [round(value, 5) for value in model.weight.flatten().tolist()]


def published_tokens(samples: int, ranks: Ranks) -> list[float]:
    """Sample i is the ids 1..i+1 with the labels id mod 2; one update in micro-batches of 4, SGD with rate 0.08."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False)
    share = samples // ranks.size
    ids = [torch.arange(1, index + 2) for index in range(ranks.rank * share, (ranks.rank + 1) * share)]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORED_LABEL)

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
        labels = torch.where(ids < 0, IGNORED_LABEL, ids % 2)
        return summed_cross_entropy(model(ids[..., None].float()), labels), float(count_labels(labels))

    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.08), ranks=ranks)
    accumulation.update(split_batch(padded, 4), loss)
    return [round(value, 4) for value in model.weight.flatten().tolist()]


# --- running ---


def alone(train: Callable[[Task], None]) -> dict[str, Any]:
    """One contender in this process."""
    tasks = {
        "A": Task(ragged_samples(8)),
        "B": Task(ragged_samples(10), epochs=2),
        "C": Task(ragged_samples(7)),
    }
    for task in tasks.values():
        train(task)
    expected, made = len(tasks["B"].expected()), tasks["B"].updates_made()
    return {
        **{name: tasks[name].error(1 if name == "B" else 0) for name in tasks},
        "B_updates": {"made": made, "expected": expected},
    }


def on_this_rank(name: str, output: Path) -> None:
    """One contender's part in a run over two ranks; rank 0 writes its error."""
    if name == "published":
        ranks = join_ranks(torch.device("cpu"))
        answer: Any = published_tokens(16, ranks)
    else:
        task = Task(ragged_samples(8), steps=2, world=2)
        OVER_RANKS[name](task)
        answer = task.error(0)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(answer), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def over_ranks(name: str) -> Any:  # noqa: ANN401 - an error, or the published weights
    """Two processes under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(  # noqa: S603 - this file, by this interpreter
            [*torchrun, __file__, "--rank-of", name, "--output", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(output.read_text(encoding="utf-8"))


def quietly() -> None:
    """The frameworks' notes are not results."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def show(rows: dict[str, dict[str, Any]], ranks: dict[str, float], published: dict[str, Any]) -> None:
    """Print the tables as markdown."""
    print("| | A: ragged | B: short last window | B: updates made | C: 2, 2, 2, 1 |\n|---|---|---|---|---|")
    for name, row in rows.items():
        updates = "{made} of {expected}".format(**row["B_updates"])
        print(f"| {name} | {row['A']:.2g} | {row['B']:.2g} | {updates} | {row['C']:.2g} |")
    print("\n| over two ranks | error |\n|---|---|")
    for name, error in ranks.items():
        print(f"| {name} | {error:.2g} |")
    print("\n| published result, by ours | weights |\n|---|---|")
    for name, weights in published.items():
        print(f"| {name} | {weights} |")


def main() -> None:
    """Run, print tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "accumulation_exactness.json"
    )
    options = parser.parse_args()
    quietly()
    if options.rank_of:
        on_this_rank(options.rank_of, options.output)
        return
    rows = {name: alone(train) for name, train in ALONE.items()}
    ranks = {name: over_ranks(name) for name in OVER_RANKS}
    published = {
        "2.04000, in one batch": published_regression(8),
        "2.04000, in 4 micro-batches": published_regression(2),
        "[0.0953, 0.4337], 8 samples": published_tokens(8, Ranks()),
        "[0.2117, 0.3172], 16 samples": published_tokens(16, Ranks()),
        "[0.2117, 0.3172], 16 samples over two ranks": over_ranks("published"),
    }
    show(rows, ranks, published)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/accumulation_exactness.py", *sys.argv[1:]]),
        "device": cpu().name,
        "python": platform.python_version(),
        "versions": {**installed_versions(), **{name: version(name) for name in ("accelerate", "lightning")}},
        "one_process": rows,
        "two_ranks": ranks,
        "published": published,
    }
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
