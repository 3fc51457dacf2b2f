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

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accumulation_loops import ALONE, OVER_RANKS
from accumulation_task import Task, ragged_samples
from reporting import measured_here, new_parser, print_head, print_row, write_result
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.training.accumulation.collectives import Ranks, join_ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.micro_batches.splitting import split_batch
from batchwright.workloads.base import IGNORED_LABEL, count_labels, summed_cross_entropy

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
    print_head("", "A: ragged", "B: short last window", "B: updates made", "C: 2, 2, 2, 1")
    for name, row in rows.items():
        updates = "{made} of {expected}".format(**row["B_updates"])
        print_row(name, f"{row['A']:.2g}", f"{row['B']:.2g}", updates, f"{row['C']:.2g}")
    print()
    print_head("over two ranks", "error")
    for name, error in ranks.items():
        print_row(name, f"{error:.2g}")
    print()
    print_head("published result, by ours", "weights")
    for item in published.items():
        print_row(*item)


def main() -> None:
    """Run, print tables, write the figures."""
    parser = new_parser(__doc__, "accumulation_exactness.json")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
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
    figures = {"one_process": rows, "two_ranks": ranks, "published": published}
    write_result(options.output, measured_here("accelerate", "lightning") | figures)


if __name__ == "__main__":
    main()
