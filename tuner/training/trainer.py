"""The training loop: windows of exactly the effective batch, one optimizer update each, checkpoints between them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from tuner.errors import CheckpointError, TrainingError
from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.planning.fingerprint import canonical_json
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import RunOutcome, TrainingProgress
from tuner.training.accumulation.collectives import Ranks
from tuner.training.accumulation.engine import UpdateReport
from tuner.training.batch_schedule import Position, Windows, cut
from tuner.training.checkpoints import Checkpoints, State, Weights, save_weights
from tuner.training.coupling.admission import admit, measure_coupling
from tuner.training.data import (
    WORKER_BYTES,
    DataFolders,
    Part,
    TrainingData,
    Window,
    WindowLoader,
    build_data,
    epoch_order,
)
from tuner.training.fsdp import copy_into, load_optimizer, load_weights, shard, whole
from tuner.training.launching.run_directory import RunPaths, decisive
from tuner.training.micro_batches.rng_state import RandomState, seed_everything
from tuner.training.micro_batches.splitting import MicroBatch
from tuner.training.optimizers import build_schedule
from tuner.training.update_engine import UpdateEngine
from tuner.units import format_bytes
from tuner.workloads.base import Batch, Workload
from tuner.workloads.build import build_model, build_workload

ProgressSink = Callable[[TrainingProgress], None]

_SEEDS_APART = 2**31 - 1
"""How far the seeds of two ranks are apart; any number that users do not count in."""


class TrainingLoop:
    """A run on this rank's device. All ranks call the same methods in the same order.

    Args:
        recommendation: gives the spec, the plan and the memory limit.
        request: how long to train, and how often to write a checkpoint.
        paths: the run's files, written by rank 0.
        device: this rank's device.
        ranks: the ranks that share each window.

    Attributes:
        notes: what the user should know of the run, a sentence each.

    Raises:
        TrainingError: when the recommendation cannot be trained, or its loss couples samples and that is not allowed.
        SpecError: when the spec has no data, or data that does not go with its model.
    """

    def __init__(
        self,
        recommendation: Recommendation,
        request: TrainingRequest,
        paths: RunPaths,
        device: MemoryDevice,
        ranks: Ranks | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.micro_batch_size = self._bounded(trainable_micro_batch_size(recommendation), paths.bound())
        self.recommendation = recommendation
        self.request = request
        self.paths = paths
        self.spec = recommendation.request.spec
        self.device = device
        self.ranks = ranks or Ranks()
        self.position = Position()
        workload = build_workload(self.spec)
        self.data = build_data(self.spec, workload, DataFolders.of_run(paths.cache / "datasets"))
        epoch_order(request.seed, 0, len(self.data))  # as large as that of any epoch: in memory before the limit
        self.windows = self._windows()
        self._workload = workload
        self.coupling: str | None = None
        self.checked = False
        if self.ranks.gather(paths.checkpointed_update())[0] is None:
            self._check_coupling()
        self._limit_memory()
        seed_everything(request.seed)
        self.model = self._build_model(workload)
        self.engine = UpdateEngine(self.spec, workload, self.model, device, ranks=self.ranks, sharded=self.sharded)
        self.engine.accumulation.largest_micro_batch = self.micro_batch_size
        self.schedule = build_schedule(self.spec.schedule, self.engine.optimizer, request.updates)
        self.checkpoints = Checkpoints(paths, self._identity(), request.keep_checkpoints)
        self._saved: int | None = None
        self._seed_this_rank()
        if self.windows.effective_batch_size > len(self.data):
            batch, samples = self.windows.effective_batch_size, len(self.data)
            self.notes.append(
                f"the data has {samples} samples, below the effective batch of {batch}: each update takes all"
            )

    def _bounded(self, micro_batch_size: int, bound: int | None) -> int:
        if bound is None or bound >= micro_batch_size:
            return micro_batch_size
        self.notes.append(
            f"a micro-batch did not fit, so they have at most {bound} samples instead of {micro_batch_size}; the "
            "effective batch stays"
        )
        return bound

    def _windows(self) -> Windows:
        batch = self.recommendation.request.effective_batch_size
        return Windows(self.request.seed, len(self.data), batch, self.ranks.rank, self.ranks.size)

    def _limit_memory(self) -> None:
        """On the CPU the run keeps to the limit it was tuned for; a card is its own limit unless a smaller one was set.

        The data set is in memory by now: the budget is for what a card would hold.
        """
        limit = self.recommendation.headroom.limit_bytes if self.recommendation.headroom else None
        if limit is not None and (self.device.torch_device.type == "cpu" or limit < self.device.total_bytes()):
            self.device.limit(limit)

    def _check_coupling(self) -> None:
        """Find out, once, whether accumulation would change the loss. Rank 0 does, and all hear of it.

        A tuning that has compared it need not be repeated: its evidence tells.

        Raises:
            TrainingError: when it would, and that is not allowed.
        """
        if self.checked or not self._accumulates():
            return
        self.coupling = self.ranks.together(self._coupling_on_rank_0)[0]
        self.checked = True
        if self.coupling is not None:
            self.notes.append(self.coupling)

    def _coupling_on_rank_0(self) -> str | None:
        if self.ranks.rank:
            return None
        allowed = self.request.allow_batch_coupling or self.recommendation.request.allow_batch_coupling
        check = self.recommendation.evidence.coupling or measure_coupling(self.spec, self._workload, self.device)
        return admit(check, allowed=allowed)

    def _accumulates(self) -> bool:
        return len(self.windows.parts(Position(), self.micro_batch_size)) > 1 or self.ranks.size > 1

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a shard of the model, and all go through every micro-batch together."""
        return self.spec.parallelism.strategy == "fsdp" and self.ranks.size > 1

    def _build_model(self, workload: Workload) -> nn.Module:
        model = build_model(self.spec, workload)
        if self.sharded:
            shard(model, self.device.torch_device, self.ranks.size)
        model.to(self.device.torch_device)
        if self.spec.compile:
            model.compile()
        return model

    def _seed_this_rank(self) -> None:
        """Ranks have built the same weights; from here on each draws random numbers of its own (dropout)."""
        if self.ranks.rank:
            seed_everything(self.request.seed + self.ranks.rank * _SEEDS_APART + self.position.update)

    def _identity(self) -> str:
        """What must be the same for a checkpoint to be this run's: everything the weights depend on."""
        return canonical_json({**decisive(self.recommendation, self.request), "samples": len(self.data)})

    def resume(self) -> int | None:
        """Go on from the newest checkpoint that is intact, if there is one; returns its update.

        Rank 0 compares the files with their checksums and chooses; the others take the one that it has chosen. A newer
        one that is damaged is named in ``notes``.

        Raises:
            CheckpointError: when there are checkpoints and none is intact, or it belongs to another run.
            PeerError: when another rank cannot read the checkpoint.
        """
        first = not self.ranks.rank
        with self.device.without_limit():
            found = self.ranks.together(lambda: self.checkpoints.newest() if first else None)[0]
            if found is None:
                return None
            self.notes += found.notes
            loaded: list[tuple[Weights, State]] = []
            self.ranks.together(lambda: loaded.append(self.checkpoints.load(found.update, checked=first)))
            self._restore(*loaded.pop())
            self._check_coupling()  # unless the checkpoint says that it was done
        self._saved = found.update
        return found.update

    def run(self, report: ProgressSink, should_stop: Callable[[], bool] = lambda: False) -> RunOutcome:
        """Train until all updates are made or ``should_stop`` answers true on a rank.

        A checkpoint is written either way. What the device or the workload raises comes out as it is; the last
        checkpoint stays.

        Args:
            report: is told of every update, on rank 0.
            should_stop: asked before every update.
        """
        windows = _Drawn(
            self.windows.after(self.position, self.request.updates, self.largest_micro_batch, alike=self.sharded)
        )
        loader = WindowLoader(self.data, windows, workers=self._workers(), seed=self.request.seed)
        loaded = iter(loader)  # held: dropped, it would end the workers under the limit
        try:
            self._run(loaded, windows, report, should_stop)
        finally:
            with self.device.without_limit():  # it may take threads to tell the workers
                loader.close()
        self._save()
        return RunOutcome.SUCCEEDED if self.position.update >= self.request.updates else RunOutcome.STOPPED

    def _workers(self) -> int:
        """Processes that load data: as many as were asked for and half of the memory beside the plan has room for.

        The other half is for what they load.
        """
        asked, headroom = self.request.workers, self.recommendation.headroom
        if self.device.torch_device.type != "cpu" or headroom is None or not asked:
            return asked
        free = headroom.limit_bytes - headroom.peak_bytes
        most = max(1, free // 2 // WORKER_BYTES)
        if asked > most:
            self.notes.append(
                f"{most} of the {asked} workers that were asked for load data: each takes {format_bytes(WORKER_BYTES)} "
                f"of the memory limit, of which {format_bytes(free)} lie beside the plan; the weights stay the same"
            )
        return min(asked, most)

    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch that may still be tried on this rank."""
        return self.engine.accumulation.largest_micro_batch or self.micro_batch_size

    def _run(
        self, loaded: Iterator[list[Batch]], windows: _Drawn, report: ProgressSink, should_stop: Callable[[], bool]
    ) -> None:
        while self.position.update < self.request.updates:
            began = time.perf_counter()
            batches: list[Batch] = []
            if any(self.ranks.together(lambda: _load(loaded, batches, should_stop))):  # noqa: B023 - called at once
                return
            progress = self._update(_micro_batches(self.data, windows.next(), batches, self.request.seed), began)
            if not self.ranks.rank:
                report(progress)
            if self.position.update % self.request.checkpoint_every == 0:
                self._save()

    def save_weights(self) -> str:
        """Write the weights, and their moving averages if the spec asks for them; returns the weights' SHA-256.

        Rank 0 writes; the others return an empty text.
        """
        weights = self._weights()
        averages = whole(self.engine.averages_by_name(), keep=not self.ranks.rank)
        if self.ranks.rank:
            return ""
        if averages:
            save_weights({**weights, **averages}, self.paths.average_weights)
        return save_weights(weights, self.paths.weights)

    # --- one update ---

    def _update(self, micro_batches: Sequence[MicroBatch], began: float) -> TrainingProgress:
        rate = float(self.schedule.get_last_lr()[0])
        outcome = self.engine.update(micro_batches)
        if not outcome.skipped:
            self.schedule.step()
        samples, epoch = self.windows.size(self.position), self.position.epoch
        self._note_splits(outcome)
        self.position = replace(self.windows.advanced(self.position), loss=_finite(outcome.loss))
        peak = max(self.ranks.gather(self.device.peak_bytes()))
        return TrainingProgress(
            update=self.position.update,
            updates=self.request.updates,
            loss=_finite(outcome.loss),
            terms={name: _finite(value) for name, value in outcome.terms.items()},
            weights=outcome.weights,
            learning_rate=rate,
            gradient_norm=outcome.gradient_norm,
            skipped=outcome.skipped,
            samples=samples,
            micro_batch_sizes=outcome.micro_batch_sizes,
            splits=outcome.splits,
            samples_seen=self.position.seen,
            epoch=epoch,
            seconds=time.perf_counter() - began,
            peak_bytes=peak,
        )

    def _note_splits(self, outcome: UpdateReport) -> None:
        """A window of one micro-batch needs no check for coupled samples, until it is divided."""
        if outcome.splits and not self.checked:
            self.checked = True
            self.coupling = (
                "micro-batches were divided after one did not fit; whether the loss couples the samples of a batch, so "
                "that this changes it, was not checked"
            )
            self.notes.append(self.coupling)

    # --- checkpoints ---

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this update. Rank 0 writes, with the random state of all ranks."""
        if self._saved == self.position.update:
            return
        with self.device.without_limit():
            mine = {
                "random": RandomState.now(self.device.torch_device).plain(),
                "largest": self.largest_micro_batch(),
            }
            weights, state = self._weights(), {**self._state(), "ranks": self.ranks.gather(mine)}
            self.ranks.together(lambda: self._write(weights, state))
        self._saved = self.position.update

    def _write(self, weights: Weights, state: State) -> None:
        if not self.ranks.rank:
            self.checkpoints.save(self.position.update, weights, state)

    def _weights(self) -> Weights:
        weights: Weights = whole(dict(self.model.state_dict()), keep=not self.ranks.rank)
        return weights

    def _state(self) -> State:
        state: State = {
            "optimizer": self.engine.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.engine.scaler.state_dict(),
            "averages": list(self.engine.averages),
            "position": dict(vars(self.position)),
            "coupling": {"checked": self.checked, "note": self.coupling},
        }
        gathered: State = whole(state, keep=not self.ranks.rank)
        return gathered

    def _restore(self, weights: Weights, state: State) -> None:
        if not set(weights) <= set(self.model.state_dict()):
            raise CheckpointError(f"{self.checkpoints.directory} holds weights of another model")
        load_weights(self.model, weights)
        load_optimizer(self.engine.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if state["scaler"]:
            self.engine.scaler.load_state_dict(state["scaler"])
        for average, kept in zip(self.engine.averages, state["averages"], strict=True):
            copy_into(average, kept)
        self.position = Position(**state["position"])
        self.checked, self.coupling = state["coupling"]["checked"], state["coupling"]["note"]
        if self.coupling is not None:
            self.notes.append(self.coupling)
        self._restore_this_rank(state["ranks"])

    def _restore_this_rank(self, each_rank: list[State]) -> None:
        """A rank's own state, where there are as many ranks as before; what follows from it, where there are not."""
        largest = min(int(it["largest"]) for it in each_rank)
        if len(each_rank) == self.ranks.size:
            mine = each_rank[self.ranks.rank]
            largest = largest if self.sharded else int(mine["largest"])
            RandomState.of_plain(mine["random"]).restore(self.device.torch_device)
        elif not self.ranks.rank:
            RandomState.of_plain(each_rank[0]["random"]).restore(self.device.torch_device)
        else:
            self._seed_this_rank()
        self.engine.accumulation.largest_micro_batch = min(largest, self.micro_batch_size)


class _Drawn(Iterator[Window]):
    """Windows that a loader draws ahead of their use, kept until they are used."""

    def __init__(self, windows: Iterator[Window]) -> None:
        self._windows = windows
        self._waiting: deque[Window] = deque()

    def __next__(self) -> Window:
        window = next(self._windows)
        self._waiting.append(window)
        return window

    def next(self) -> Window:
        """The window whose batches the loader has just given."""
        return self._waiting.popleft()


def _load(loaded: Iterator[list[Batch]], into: list[Batch], should_stop: Callable[[], bool]) -> bool:
    """Load the next window, unless the run is to stop; whether it is."""
    if should_stop():
        return True
    into += next(loaded)
    return False


def _micro_batches(data: TrainingData, window: Window, batches: list[Batch], seed: int) -> list[MicroBatch]:
    return [_micro_batch(data, part, batch, seed) for part, batch in zip(window, batches, strict=True)]


def _micro_batch(data: TrainingData, part: Part, batch: Batch, seed: int) -> MicroBatch:
    """Loaded samples, which are collated anew when they are divided: padding and packing are the collation's own."""

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        smaller = [Part(part.epoch, indices) for indices in cut(part.indices, tuple(sizes))]
        return [_micro_batch(data, it, data.loaded(it.epoch, it.indices, seed), seed) for it in smaller]

    return MicroBatch(batch, len(part.indices), divide, idle=part.idle)


def trainable_micro_batch_size(recommendation: Recommendation) -> int:
    """The largest micro-batch a run of this recommendation may use.

    Raises:
        TrainingError: when nothing fits.
    """
    if not recommendation.feasible or recommendation.largest_micro_batch_size is None:
        raise TrainingError(f"this recommendation is not feasible: {recommendation.infeasible_reason}")
    return recommendation.largest_micro_batch_size


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
