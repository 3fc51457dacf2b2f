"""Scenarios of two ranks, each in its own process: ``main`` writes ``rank-R.pt`` into a folder. And runs of two ranks.

Every scenario is a function of the ranks that returns the values that the tests check.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.errors import BatchwrightError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.accumulation import balanced_plan
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import Ranks, join_ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.assembly import build_run
from batchwright.training.batch_schedule import BatchSchedule, Position
from batchwright.training.data.loading import SampleRange
from batchwright.training.fsdp import full_tensors, load_optimizer, load_weights, shard
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.splitting import MicroBatch, sliced, split_batch
from batchwright.training.trainer import Trainer
from batchwright.workloads.base import IGNORED_LABEL, LossTerms, pad_tokens
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec, recommendation

CPU = torch.device("cpu")
SPEC = gpt_spec(
    model={
        "kind": "reference",
        "architecture": {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": 61},
    }
)
WORKLOAD = build_workload(SPEC)
Outcome = dict[str, Any]
_DAMPING = 0.1
"""Adam divides by a gradient's own size: without this the rounding of a gradient that is zero would become a step."""


def ragged(count: int, seed: int = 3) -> list[Tensor]:
    """Token samples of 2 to 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 17, (count,), generator=generator).tolist()
    return [torch.randint(0, 61, (length,), generator=generator) for length in lengths]


def gpt(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build an equal GPT in every process, with tied weights."""
    torch.manual_seed(0)
    return build_model(SPEC, WORKLOAD).to(dtype)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
    """Next-token cross-entropy."""
    return WORKLOAD.loss_terms(model, batch)


def weigh(batch: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Target tokens."""
    weights: Mapping[str, float] = WORKLOAD.loss_weights(batch)  # type: ignore[attr-defined]
    return weights


def flat(model: nn.Module) -> Tensor:
    """All gradients in a row, zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def full_batch(samples: list[Tensor]) -> Tensor:
    """The gradient of all samples at once in one process, in fp64."""
    model = gpt(torch.float64)
    ((total, weight),) = loss(model, pad_tokens(samples)).values()
    torch.autograd.backward(total / weight)
    return flat(model)


def accumulated(
    ranks: Ranks,
    own: list[MicroBatch],
    run: Callable[[nn.Module, Any], LossTerms] = loss,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The gradient that all ranks' micro-batches give together, and the report."""
    model = options.pop("model", None) or gpt()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), ranks=ranks)
    report = accumulation.accumulate(own, run, options.get("weigh", weigh))
    return flat(model), report


def of_this_rank(ranks: Ranks, samples: list[Tensor], size: int = 2, first: int = 5) -> list[MicroBatch]:
    """Rank 0 has the first samples, rank 1 the rest, in micro-batches of ``size``."""
    own = samples[first:] if ranks.rank else samples[:first]
    return [sliced(pad_tokens(own[start : start + size])) for start in range(0, len(own), size)]


# --- scenarios -------------------------------------------------------------------------------------------------------


def published(ranks: Ranks) -> Outcome:
    """The published example: 16 samples, two ranks, two accumulation steps of 4."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False)
    samples = [torch.arange(1, i + 2) for i in range(16)]
    own = samples[ranks.rank * 8 : ranks.rank * 8 + 8]

    def summed(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
        labels = torch.where(ids < 0, IGNORED_LABEL, ids % 2)
        logits = model(ids[..., None].float())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), float((labels >= 0).sum())

    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.08), ranks=ranks)
    padded = nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=IGNORED_LABEL)
    accumulation.update(split_batch(padded, 4), summed)
    return {"weight": model.weight.detach().flatten()}


def uneven_ranks(ranks: Ranks) -> Outcome:
    """Rank 0 has 5 ragged samples in 3 micro-batches, rank 1 has 3 in 2."""
    samples = ragged(8)
    gradient, report = accumulated(ranks, of_this_rank(ranks, samples))
    return {"gradient": gradient, "truth": full_batch(samples), "loss": report.loss, "weights": report.weights}


def unknown_weights(ranks: Ranks) -> Outcome:
    """Uneven ranks, with weights that are only known after the forward passes."""
    samples = ragged(8)
    gradient, report = accumulated(ranks, of_this_rank(ranks, samples), weigh=None)
    return {"gradient": gradient, "truth": full_batch(samples), "weights": report.weights}


def wrong_world_factor(ranks: Ranks) -> Outcome:
    """The mutant: each rank divides by the weight of its own samples, and gradients are averaged."""
    samples = ragged(8)
    alone, _ = accumulated(Ranks(), of_this_rank(ranks, samples))
    ranks.sum_([alone])
    return {"gradient": alone / ranks.size, "truth": full_batch(samples)}


def missing_world_factor(ranks: Ranks) -> Outcome:
    """The mutant: sums divided by the global weight are averaged as DDP does, instead of summed."""
    samples = ragged(8)
    gradient, _ = accumulated(ranks, of_this_rank(ranks, samples))
    return {"gradient": gradient / ranks.size, "truth": full_batch(samples)}


def rank_without_tokens(ranks: Ranks) -> Outcome:
    """Rank 1 has samples of one token, which predict nothing."""
    samples = ragged(5)
    own = of_this_rank(ranks, samples) if not ranks.rank else [sliced(pad_tokens([torch.ones(1).long()] * 2))]
    gradient, _ = accumulated(ranks, own)
    return {"gradient": gradient, "truth": full_batch(samples)}


def rank_without_samples(ranks: Ranks) -> Outcome:
    """Rank 1 has no micro-batch at all, with weights known beforehand and without."""
    samples = ragged(5)
    own = of_this_rank(ranks, samples)
    gradient, _ = accumulated(ranks, own)
    again, _ = accumulated(ranks, own, weigh=None)
    return {"gradient": gradient, "again": again, "truth": full_batch(samples)}


def no_rank_has_tokens(ranks: Ranks) -> Outcome:
    """Samples of one token on every rank, which predict nothing."""
    _, report = accumulated(ranks, [sliced(pad_tokens([torch.ones(1).long()] * 2))])
    return {"skipped": report.skipped}


def one_rank_runs_out(ranks: Ranks) -> Outcome:
    """Rank 1 runs out of memory for anything but single samples, after its forward pass."""
    samples = ragged(8)

    def tight(model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        terms = loss(model, batch)
        if ranks.rank and len(batch["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory, injected")
        return terms

    gradient, report = accumulated(ranks, of_this_rank(ranks, samples, size=4), tight)
    return {
        "gradient": gradient,
        "truth": full_batch(samples),
        "sizes": report.micro_batch_sizes,
        "splits": [(split.rank, split.size, split.parts) for split in report.splits],
    }


def partly_used_parameters(ranks: Ranks) -> Outcome:
    """One head is used by nobody, one by rank 0 alone; AdamW decays what it steps."""
    torch.manual_seed(0)
    heads = {name: nn.Linear(4, 1, bias=False) for name in ("everybody", "rank_0", "nobody")}
    model = nn.ModuleDict(heads)
    before = {name: head.weight.detach().clone() for name, head in heads.items()}

    def partly(_: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        output = heads["everybody"](batch)
        if not ranks.rank:
            output = output + heads["rank_0"](batch)
        return output.square().sum(), float(len(batch))

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    inputs = torch.arange(16.0).view(4, 4) + ranks.rank
    accumulation = GradientAccumulation(model, optimizer, ranks=ranks)
    accumulation.accumulate(split_batch(inputs, 2), partly)
    gradients = {name: head.weight.grad for name, head in heads.items()}
    accumulation.update(split_batch(inputs, 2), partly)
    changed = {name: not torch.equal(before[name], head.weight) for name, head in heads.items()}
    return {"gradients": gradients, "changed": changed, "weights": [head.weight.detach() for head in heads.values()]}


def rank_fails(ranks: Ranks) -> Outcome:
    """Rank 1's loss raises; both learn of it, and the next window goes well."""
    samples = ragged(8)

    def failing(model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        if ranks.rank:
            raise ValueError("no such label")
        return loss(model, batch)

    error = ""
    try:
        accumulated(ranks, of_this_rank(ranks, samples), failing)
    except (BatchwrightError, ValueError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    gradient, _ = accumulated(ranks, of_this_rank(ranks, samples))
    return {"error": error, "gradient": gradient, "truth": full_batch(samples)}


def wrapped_in_ddp(ranks: Ranks) -> Outcome:
    """A model that its owner has wrapped in DistributedDataParallel, ranks with different numbers of micro-batches."""
    samples = ragged(8)
    model = nn.parallel.DistributedDataParallel(gpt())
    gradient, _ = accumulated(ranks, of_this_rank(ranks, samples), model=model)
    return {"gradient": gradient, "truth": full_batch(samples)}


def running_statistics(ranks: Ranks) -> Outcome:
    """BatchNorm sees other samples on each rank; its buffers must not drift apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = GradientAccumulation(model, optimizer, ranks=ranks, checks_coupling=False)
    inputs = torch.randn(8, 4) * (1 + ranks.rank)
    accumulation.update(split_batch(inputs, 4), lambda m, b: (m(b).square().sum(), len(b)))
    return {
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "weights": [parameter.detach() for parameter in model.parameters()],
    }


def wrapped_with_statistics(ranks: Ranks) -> Outcome:
    """BatchNorm in DistributedDataParallel, rank 1 without a sample in the first window, the ranks left to be found."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = nn.parallel.DistributedDataParallel(inner)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), checks_coupling=False)
    for window in (0, 1):
        inputs = torch.randn(8, 4) * (1 + ranks.rank)
        own = [] if ranks.rank and not window else split_batch(inputs, 4)
        accumulation.update(own, lambda m, b: (m(b).square().sum(), len(b)))
    return {
        "buffers": [buffer.clone() for buffer in inner.buffers()],
        "weights": [parameter.detach() for parameter in inner.parameters()],
    }


def frozen_layers(ranks: Ranks) -> Outcome:
    """Each rank has seeded its model differently; one layer is frozen."""
    torch.manual_seed(ranks.rank)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 1))
    GradientAccumulation(model, torch.optim.SGD(model[1].parameters(), lr=0.1), ranks=ranks)
    return {"weights": [parameter.detach().clone() for parameter in model.parameters()]}


def scaled_without_samples(ranks: Ranks) -> Outcome:
    """fp16's scaler on a rank that has no sample in the first window."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, scaler=scaler)
    own = [] if ranks.rank else split_batch(torch.ones(4, 4), 2)
    report = accumulation.update(own, lambda m, b: (m(b).sum(), len(b)))
    return {"skipped": report.skipped, "weights": [parameter.detach() for parameter in model.parameters()]}


def odd_buffers(ranks: Ranks) -> Outcome:
    """Buffers of types that gloo has no word for are sent all the same."""
    sent = [torch.full((3,), 1 + ranks.rank, dtype=dtype) for dtype in (torch.int16, torch.bool, torch.complex64)]
    sent.append(torch.tensor(7 - ranks.rank))
    ranks.broadcast_(sent)
    return {"weights": sent}


def overflow_on_one_rank(ranks: Ranks) -> Outcome:
    """fp16's scaler meets an infinite gradient on rank 1 only."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, scaler=scaler)
    inputs = torch.full((4, 4), float("inf") if ranks.rank else 1.0)
    report = accumulation.update(split_batch(inputs, 2), lambda m, b: (m(b).sum(), len(b)))
    return {"skipped": report.skipped, "scale": scaler.get_scale(), "same": torch.equal(before, model.weight)}


def sums_of_all_sizes(ranks: Ranks) -> Outcome:
    """Buckets: many small tensors, one above a bucket, two types, one that is not contiguous."""
    big = torch.full((7_000_000,), 1.0 + ranks.rank)
    tensors = [
        *(torch.full((3, 5), float(i + ranks.rank)) for i in range(4)),
        big,
        torch.full((4,), 1.0 + ranks.rank, dtype=torch.float64),
        torch.arange(6.0).view(2, 3).t() * (1 + ranks.rank),
    ]
    ranks.sum_(tensors)
    return {"tensors": [tensor if tensor.numel() < 100 else tensor[::1_000_000].clone() for tensor in tensors]}


def in_shards(ranks: Ranks) -> Outcome:
    """FSDP: 5 samples in micro-batches of 1 leave rank 1 one short; clipped, with AdamW; then out of a checkpoint."""
    samples = ragged(5)
    whole_model, whole_optimizer = _stepped(samples, gpt(), Ranks(), lock_step=False)
    model = gpt()
    shard(model, CPU, ranks.size)
    model, optimizer = _stepped(samples, model, ranks, lock_step=True)
    weights, state = full_tensors(dict(model.state_dict())), full_tensors(optimizer.state_dict())
    resumed, again = _sharded_from(weights, state, ranks)
    return {
        "weights": weights,
        "truth": {name: tensor.detach() for name, tensor in whole_model.state_dict().items()},
        "state": state,
        "state_truth": whole_optimizer.state_dict(),
        "resumed": full_tensors(dict(resumed.state_dict())),
        "again": full_tensors(again.state_dict()),
    }


def planned_shards(ranks: Ranks) -> Outcome:
    """FSDP with a plan of 5 samples, and a last window of 4: rank 0 has 3 twice, rank 1 has 2 and then 1."""
    samples, plan = ragged(9), balanced_plan(effective_batch_size=5, world_size=2, max_micro_batch_size=2)
    whole = gpt()
    _update_with([samples[:5], samples[5:]], GradientAccumulation(whole, _adamw(whole), max_norm=0.5))
    model = gpt()
    shard(model, CPU, ranks.size)
    own = [samples[3:5], samples[8:]] if ranks.rank else [samples[:3], samples[5:8]]
    accumulation = GradientAccumulation(model, _adamw(model), plan=plan, ranks=ranks, lock_step=True, max_norm=0.5)
    sizes = _update_with(own, accumulation)
    return {
        "sizes": sizes,
        "weights": full_tensors(dict(model.state_dict())),
        "truth": {name: tensor.detach() for name, tensor in whole.state_dict().items()},
    }


def narrow_shards(ranks: Ranks) -> Outcome:
    """FSDP in bf16, 64 samples in micro-batches of 1: the gradient of the window, beside those of other sums."""
    samples = ragged(64)
    model = gpt(torch.bfloat16)
    shard(model, CPU, ranks.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, ranks=ranks, lock_step=True)
    window = [sliced(pad_tokens([sample])) for sample in samples[ranks.rank :: ranks.size]]
    accumulation.accumulate(window, loss, weigh)
    sums = [full_tensors(total) for total in accumulation.gradients.tensors()]
    return {
        "types": {(total.dtype, parameter.grad.dtype) for total, parameter in _with_gradients(accumulation)},
        "sums": torch.cat([total.flatten() for total in sums]),
        "truth": torch.cat([total.flatten() for total in _whole_sums(samples)]),
    }


def noise_of_both_ranks(ranks: Ranks) -> Outcome:
    """Each rank measures its first micro-batch of two, of ragged samples; weights known beforehand and not."""
    samples = ragged(8)
    return {
        "found": [_noise(ranks, of_this_rank(ranks, samples), gpt(), weigher) for weigher in (weigh, None)],
        "truth": _noise_truth(samples, [samples[:2], samples[5:7]]),
    }


def noise_of_one_micro_batch_each(ranks: Ranks) -> Outcome:
    """A single micro-batch on each rank: the ranks' own gradients are what is compared."""
    samples = ragged(8)
    return {
        "found": [_noise(ranks, of_this_rank(ranks, samples, size=5), gpt(), weigh)],
        "truth": _noise_truth(samples, [samples[:5], samples[5:]]),
    }


def noise_of_shards(ranks: Ranks) -> Outcome:
    """FSDP: the first micro-batches of both ranks are one part of the window."""
    samples, model = ragged(8), gpt()
    shard(model, CPU, ranks.size)
    own = of_this_rank(ranks, samples, first=4)
    return {
        "found": [_noise(ranks, own, model, weigh, lock_step=True)],
        "truth": _noise_truth(samples, [[*samples[:2], *samples[4:6]]]),
    }


def _noise(
    ranks: Ranks, own: list[MicroBatch], model: nn.Module, weigher: Any, *, lock_step: bool = False
) -> tuple[float, float] | None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, ranks=ranks, lock_step=lock_step)
    noise = accumulation.update(own, loss, weigher, measures_noise=True).noise
    return None if noise is None else (noise.variance, noise.squared_norm)


def _noise_truth(samples: list[Tensor], parts: list[list[Tensor]]) -> tuple[float, float]:
    """Variance and squared norm from gradients of the parts in one process, in fp64."""
    large, tokens = float(full_batch(samples).square().sum()), weigh(pad_tokens(samples))["next_token"]
    shares = [weigh(pad_tokens(part))["next_token"] / tokens for part in parts]
    squares = [float(full_batch(part).square().sum()) * share for part, share in zip(parts, shares, strict=True)]
    variance = len(samples) * (sum(squares) - sum(shares) * large) / (len(parts) - sum(shares))
    return variance, large - variance / len(samples)


def _with_gradients(accumulation: GradientAccumulation) -> list[tuple[Tensor, Any]]:
    return list(zip(accumulation.gradients.tensors(), accumulation.parameters, strict=True))


def _whole_sums(samples: list[Tensor]) -> list[Tensor]:
    """The fp32 sums of the same micro-batches in one process, of the whole model in bf16."""
    model = gpt(torch.bfloat16)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accumulation.accumulate([sliced(pad_tokens([sample])) for sample in samples], loss, weigh)
    return accumulation.gradients.tensors()


def shards_that_average(ranks: Ranks) -> Outcome:
    """A model in shards with torch's own averaging: half the gradient on two ranks, if nobody objects."""
    model = gpt()
    shard(model, CPU, ranks.size)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(ranks.size) if ranks.rank else None)  # type: ignore[arg-type] # as it is when never set
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), ranks=ranks, lock_step=True)
    try:
        accumulation.update([sliced(pad_tokens(ragged(2)))], loss, weigh)
    except WorkloadError as error:
        return {"message": str(error)}
    return {"message": "none"}


def _update_with(batches: list[list[Tensor]], accumulation: GradientAccumulation) -> list[tuple[int, ...]]:
    """Update with one batch per window. Return the sizes of its micro-batches."""
    return [accumulation.update([pad_tokens(batch)], loss, weigh).micro_batch_sizes for batch in batches]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=_DAMPING)


def _stepped(
    samples: list[Tensor], model: nn.Module, ranks: Ranks, *, lock_step: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = _adamw(model)
    accumulation = GradientAccumulation(model, optimizer, ranks=ranks, lock_step=lock_step, max_norm=0.5)
    schedule = BatchSchedule(0, len(samples), len(samples), ranks.rank, ranks.size)
    for _ in range(2):
        window = schedule.window(Position(), 1, equal_counts=lock_step)
        accumulation.update([_micro_batch(samples, sample_range) for sample_range in window], loss, weigh)
    return model, optimizer


def _micro_batch(samples: list[Tensor], sample_range: SampleRange) -> MicroBatch:
    batch = pad_tokens([samples[index] for index in sample_range.indices])
    return MicroBatch(batch, len(sample_range.indices), lambda _: [], is_padding=sample_range.is_padding)


def _sharded_from(weights: Any, state: Any, ranks: Ranks) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt()
    shard(model, CPU, ranks.size)
    optimizer = _adamw(model)
    load_weights(model, {name: tensor for name, tensor in weights.items() if name != "head.weight"})
    load_optimizer(optimizer, state)
    return model, optimizer


SCENARIOS: dict[str, Callable[[Ranks], Outcome]] = {
    buffer.__name__: buffer
    for buffer in (
        published,
        uneven_ranks,
        unknown_weights,
        wrong_world_factor,
        missing_world_factor,
        rank_without_tokens,
        rank_without_samples,
        no_rank_has_tokens,
        one_rank_runs_out,
        partly_used_parameters,
        rank_fails,
        wrapped_in_ddp,
        running_statistics,
        wrapped_with_statistics,
        frozen_layers,
        scaled_without_samples,
        odd_buffers,
        overflow_on_one_rank,
        sums_of_all_sizes,
        in_shards,
        planned_shards,
        narrow_shards,
        shards_that_average,
        noise_of_both_ranks,
        noise_of_one_micro_batch_each,
        noise_of_shards,
    )
}


def main(folder: Path) -> None:
    """Run all scenarios as the rank that the environment says."""
    ranks = join_ranks(CPU)
    outcomes = {name: scenario(ranks) for name, scenario in SCENARIOS.items()}
    torch.save(outcomes, folder / f"rank-{ranks.rank}.pt")
    ranks.close()


def train(folder: Path, specs: Mapping[str, WorkloadSpec], updates: int) -> None:
    """Make a run of each spec in a folder of its name, with its evaluation beside the weights.

    Runs of two ranks otherwise import their libraries in two processes each.
    """
    ranks = join_ranks(CPU)
    for name, spec in specs.items():
        paths, request = RunPaths(folder / name), TrainingRequest(updates=updates)
        trainer = Trainer(build_run(recommendation(spec, 10, 4), request, paths, open_device("cpu"), ranks))
        trainer.run(lambda _: None)
        trainer.save_weights()
        if trainer.evaluation is not None and not ranks.rank:
            (paths.directory / "evaluation.json").write_text(trainer.evaluation.summary().model_dump_json())
        gc.freeze()  # the libraries that a run imports, which each collection of the next runs would look through
    ranks.close()
