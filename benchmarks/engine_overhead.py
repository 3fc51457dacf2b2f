"""Seconds per update of the accumulation engine, next to the shortest correct loop, Accelerate and Lightning.

python benchmarks/engine_overhead.py [--rounds 60] [--cases mlp] [--no-peers] [--output FILE]

All of them move copies of the same model over the same micro-batches, with the same optimizer and the same clipping, in
one process and on one thread. A round is one update of each, in an order of its own; a ratio compares two updates of
the same round, so that what else the machine does falls on both. Lightning trains from the first round to the last, and
the others take their turns in its callback. Each model is measured twice: with the allocator's own settings, and with
those that the project's probes and jobs run with. The second hand-written loop shows what a ratio of 1 looks like.

`in-place` is what the engine does by itself on the CPU, `scratch` what it does on a card. The MLP is the worst case for
`scratch`: 16.8 million parameters for micro-batches of 8 samples, and plain SGD. Many tiny micro-batches show what the
engine does around each of them, and many tensors what it does for each parameter.
"""

import argparse
import copy
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, get_args

import torch
from reporting import measured_here, new_parser, print_head, print_row, write_result
from torch import Tensor, nn

from batchwright.device_traits import CPU_ALLOCATOR, CPU_THREADS
from batchwright.schemas.workload import parse_spec
from batchwright.torch_internals import foreach_add_
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.workloads.base import Batch, LossTerms
from batchwright.workloads.build import build_workload

MAX_NORM = 1.0
YARDSTICK = "hand-written"
WARM_UP = 3
"""Updates of each before the first round that counts: optimizer states, caches, the allocator's pools."""
_PEERS = {True: ["--peers"], False: ["--no-peers"]}
Update = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model, its micro-batches and its optimizer."""

    architecture: Mapping[str, Any]
    batch: Mapping[str, int]
    micro_batch_size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    micro_batches: int = 4


CASES = {
    "gpt": Case(
        {"name": "gpt", "layers": 4, "heads": 4, "width": 128},
        {"sequence_length": 128},
        2,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    ),
    "mlp": Case(
        {"name": "mlp", "input_features": 2048, "hidden_features": 2048, "hidden_layers": 4},
        {},
        8,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    ),
    "mlp, 400 tiny micro-batches": Case(
        {"name": "mlp", "input_features": 256, "hidden_features": 256, "hidden_layers": 4},
        {},
        2,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        micro_batches=400,
    ),
    "gpt, 124 tensors, 40 small micro-batches": Case(
        {"name": "gpt", "layers": 10, "heads": 2, "width": 64, "vocabulary_size": 256},
        {"sequence_length": 32},
        2,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        micro_batches=40,
    ),
}
ENVIRONMENTS: dict[str, dict[str, str]] = {"default allocator": {}, "the project's allocator settings": CPU_ALLOCATOR}


@dataclass(frozen=True)
class Spent:
    """What one update took."""

    wall_seconds: float
    cpu_seconds: float
    page_faults: int


class Meter:
    """Reads the clocks of this process; ``spent`` is what went by since ``start``."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """From here."""
        self._begin = self._now()

    def spent(self) -> Spent:
        """Until here."""
        wall, processor, faults = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return Spent(wall, processor, int(faults))

    @staticmethod
    def _now() -> tuple[float, float, int]:
        return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# --- the contenders ---


class Setting:
    """What all contenders share: the model they copy, the micro-batches of an update, the loss."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        model = {"kind": "reference", "architecture": case.architecture}
        self.workload: Any = build_workload(parse_spec({"model": model, "batch": case.batch}))
        self._model = self.workload.build_model()
        self._case = case
        self.window: list[Batch] = [self.workload.make_batch(case.micro_batch_size) for _ in range(case.micro_batches)]
        self.models: dict[str, nn.Module] = {}

    def model_and_optimizer(self, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A contender's own copy."""
        model = copy.deepcopy(self._model)
        self.models[name] = model
        return model, self._case.optimizer(model.parameters())

    def loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Named sums with their weights, as the engine takes them."""
        terms: LossTerms = self.workload.loss_terms(model, batch)
        return terms

    def sum_and_weight(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """The only term of the loss."""
        ((loss_sum, weight),) = self.loss(model, batch).values()
        return loss_sum, float(weight)

    def mean(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the micro-batch, as the frameworks take it; all micro-batches here weigh the same."""
        loss_sum, weight = self.sum_and_weight(model, batch)
        return loss_sum / weight


def hand_written(setting: Setting, name: str) -> Update:
    """The shortest loop that is right: the weight of the window is known, and each sum is divided by it."""
    model, optimizer = setting.model_and_optimizer(name)
    with torch.no_grad():
        weight = sum(setting.sum_and_weight(model, batch)[1] for batch in setting.window)

    def update() -> None:
        for batch in setting.window:
            loss_sum, _ = setting.sum_and_weight(model, batch)
            (loss_sum / weight).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def hand_written_scratch(setting: Setting, name: str) -> Update:
    """The shortest loop that sums outside of what a backward pass writes: the least that `scratch` can cost."""
    model, optimizer = setting.model_and_optimizer(name)
    parameters = list(model.parameters())
    with torch.no_grad():
        weight = sum(setting.sum_and_weight(model, batch)[1] for batch in setting.window)

    def update() -> None:
        sums: list[Tensor] = []
        for batch in setting.window:
            loss_sum, _ = setting.sum_and_weight(model, batch)
            (loss_sum / weight).backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if sums:
                foreach_add_(sums, gradients)
            else:
                sums = gradients
            optimizer.zero_grad()
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def ours(
    setting: Setting, name: str, gathering: Gathering, *, beforehand: bool, measures_noise: bool = False
) -> Update:
    """The engine; ``beforehand`` tells it the weights, else it finds them in the forward passes."""
    model, optimizer = setting.model_and_optimizer(name)
    accumulation = GradientAccumulation(model, optimizer, max_norm=MAX_NORM, gathering=gathering)
    weigh = setting.workload.loss_weights if beforehand else None
    return lambda: accumulation.update(setting.window, setting.loss, weigh, measures_noise=measures_noise)


def accelerate(setting: Setting) -> Update:
    """Accelerate's documented loop."""
    from accelerate import Accelerator  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(setting.window))
    model, optimizer = accelerator.prepare(*setting.model_and_optimizer("accelerate"))

    def update() -> None:
        for batch in setting.window:
            with accelerator.accumulate(model):
                accelerator.backward(setting.mean(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return update


def run_beside_lightning(setting: Setting, rounds: int, turn: Callable[[Spent], None]) -> None:
    """Train with Lightning; after each of its updates ``turn`` learns what it took, and may take its time."""
    import lightning  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    model, optimizer = setting.model_and_optimizer("Lightning")
    meter = Meter()

    class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore] # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _index: int) -> Tensor:
            return setting.mean(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Turns(lightning.Callback):  # type: ignore[misc,unused-ignore] # as above
        done = 0

        def on_train_batch_end(self, trainer: Any, *_: object) -> None:  # noqa: ANN401 - Lightning's own hook
            if trainer.global_step > self.done:
                self.done = trainer.global_step
                turn(meter.spent())
                meter.start()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=rounds,
        max_epochs=-1,
        accumulate_grad_batches=len(setting.window),
        gradient_clip_val=MAX_NORM,
        callbacks=[Turns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), itertools.cycle(setting.window))


# --- measuring ---


def measure(case: Case, rounds: int, *, peers: bool) -> dict[str, list[Spent]]:
    """What each contender's update took in each round."""
    setting = Setting(case)
    updates: dict[str, Update] = {YARDSTICK: hand_written(setting, YARDSTICK)}
    for gathering, beforehand in itertools.product(get_args(Gathering), (False, True)):
        name = f"ours, {gathering}{', weights beforehand' if beforehand else ''}"
        updates[name] = ours(setting, name, gathering, beforehand=beforehand)
    for gathering in get_args(Gathering):
        name = f"ours, {gathering}, noise measured"
        updates[name] = ours(setting, name, gathering, beforehand=False, measures_noise=True)
    again, scratch = f"{YARDSTICK}, again", f"{YARDSTICK}, scratch"
    updates[again] = hand_written(setting, again)
    updates[scratch] = hand_written_scratch(setting, scratch)
    if peers:
        updates["accelerate"] = accelerate(setting)
    spent: dict[str, list[Spent]] = {name: [] for name in (*updates, *(["Lightning"] if peers else []))}
    shuffled = random.Random(0)

    def turn(lightning_spent: Spent | None) -> None:
        if lightning_spent is not None:
            spent["Lightning"].append(lightning_spent)
        for name in shuffled.sample(list(updates), len(updates)):
            meter = Meter()
            updates[name]()
            spent[name].append(meter.spent())

    if peers:
        run_beside_lightning(setting, WARM_UP + rounds, turn)
    else:
        for _ in range(WARM_UP + rounds):
            turn(None)
    _check_alike(setting.models)
    return {name: column[WARM_UP:] for name, column in spent.items()}


def _check_alike(models: Mapping[str, nn.Module]) -> None:
    """All have made the same updates: a contender that leaves work out would not be compared."""
    yardstick = models[YARDSTICK].state_dict()
    for name, model in models.items():
        for key, value in model.state_dict().items():
            assert torch.allclose(value, yardstick[key], rtol=1e-2, atol=1e-4), f"{name} differs in {key}"


def _ratios(column: list[Spent], yardstick: list[Spent], figure: str) -> dict[str, float]:
    ratios = [getattr(a, figure) / getattr(b, figure) for a, b in zip(column, yardstick, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    rounded = {"median": median(ratios), "quartile_1": low, "quartile_3": high, "worst": max(ratios)}
    return {name: round(ratio, 4) for name, ratio in rounded.items()}


def summary(spent: Mapping[str, list[Spent]]) -> dict[str, dict[str, Any]]:
    """Per contender the medians, and the ratios to the hand-written loop in the same round."""
    yardstick = spent[YARDSTICK]
    return {
        name: {
            "wall_seconds": round(median(it.wall_seconds for it in column), 5),
            "cpu_seconds": round(median(it.cpu_seconds for it in column), 5),
            "page_faults": median(it.page_faults for it in column),
            "wall_ratio": _ratios(column, yardstick, "wall_seconds"),
            "cpu_ratio": _ratios(column, yardstick, "cpu_seconds"),
        }
        for name, column in spent.items()
    }


def measure_in_child(
    case: str, options: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """A fresh process, since the allocator reads its settings as it starts."""
    clean = {name: value for name, value in os.environ.items() if name not in CPU_ALLOCATOR}
    answer = subprocess.run(  # noqa: S603 - this file, by this interpreter
        [sys.executable, __file__, "--rounds", str(options.rounds), "--child", case, *_PEERS[options.peers]],
        env={**clean, **CPU_THREADS, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    figures: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def show(case: str, environment: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one table as markdown."""
    print(f"\n{case}, {environment}\n")
    print_head("loop", "s per update", "ratio, wall (quartiles)", "ratio, CPU (quartiles)", "page faults")
    for name, row in figures.items():
        wall, processor = (
            f"{row[it]['median']:.3f} ({row[it]['quartile_1']:.3f}-{row[it]['quartile_3']:.3f})"
            for it in ("wall_ratio", "cpu_ratio")
        )
        print_row(name, f"{row['wall_seconds']:.4f}", wall, processor, f"{row['page_faults']:g}")


def _runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case, (environment, settings) in itertools.product(options.cases, ENVIRONMENTS.items()):
        figures = measure_in_child(case, options, settings)
        show(case, environment, figures)
        yield {"model": case, "micro_batches": CASES[case].micro_batches, "environment": environment, "loops": figures}


def main() -> None:
    """Run, print tables, write the figures."""
    parser = new_parser(__doc__, "engine_overhead.json")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(1)
        print(json.dumps(summary(measure(CASES[options.child], options.rounds, peers=options.peers))))
        return
    peers = ("accelerate", "lightning") if options.peers else ()
    document = measured_here(*peers) | {"threads": 1, "rounds": options.rounds}
    write_result(options.output, document | {"runs": list(_runs(options))})


if __name__ == "__main__":
    main()
