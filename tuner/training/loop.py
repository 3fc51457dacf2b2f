"""The training loop: windows of exactly the effective batch, one optimizer update each, checkpoints between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tuner.accumulation import balanced_split
from tuner.errors import TrainingError
from tuner.fingerprint import canonical_json
from tuner.memory.devices import MemoryDevice
from tuner.requests import TrainingRequest
from tuner.results import Recommendation
from tuner.training.checkpoints import (
    Checkpoints,
    State,
    random_state,
    restore_random_state,
    save_weights,
    seed_everything,
)
from tuner.training.data import build_data, epoch_order
from tuner.training.engine import UpdateEngine, UpdateReport
from tuner.training.optimizers import build_schedule
from tuner.training.runs import RunOutcome, RunPaths, TrainingProgress
from tuner.workloads.base import Workload
from tuner.workloads.build import build_model, build_workload

ProgressSink = Callable[[TrainingProgress], None]


@dataclass
class Position:
    """Where a run is. All of it is in a checkpoint."""

    update: int = 0
    epoch: int = 0
    committed: int = 0
    """Samples of this epoch that updates have used."""
    seen: int = 0
    """Samples used since the run began."""
    loss: float | None = None
    """Of the last update; none when it was not finite, or before the first."""


class TrainingLoop:
    """A run on one device in one process.

    Args:
        recommendation: gives the spec, the plan and the memory limit.
        request: how long to train, and how often to write a checkpoint.
        paths: the run's files.
        device: the recommendation's device, opened in this process.

    Raises:
        TrainingError: when the recommendation cannot be trained by one process.
        SpecError: when the spec has no data, or data that does not go with its model.
    """

    def __init__(
        self, recommendation: Recommendation, request: TrainingRequest, paths: RunPaths, device: MemoryDevice
    ) -> None:
        self.micro_batch_size = trainable_micro_batch_size(recommendation)
        self.recommendation = recommendation
        self.request = request
        self.paths = paths
        self.spec = recommendation.request.spec
        self.position = Position()
        seed_everything(request.seed)
        self.device = device
        workload = build_workload(self.spec)
        self.data = build_data(self.spec, workload)
        epoch_order(request.seed, 0, len(self.data))  # as large as that of any epoch: in memory before the limit
        self._limit_memory()
        self.model = self._build_model(workload)
        self.engine = UpdateEngine(self.spec, workload, self.model, self.device.torch_device)
        self.schedule = build_schedule(self.spec.schedule, self.engine.optimizer, request.updates)
        self.checkpoints = Checkpoints(paths, self._identity(), request.keep_checkpoints)

    def _limit_memory(self) -> None:
        """On the CPU the run keeps to the limit it was tuned for; a card is its own limit unless a smaller one was set.

        The data set is in memory by now: the budget is for what a card would hold.
        """
        limit = self.recommendation.headroom.limit_bytes if self.recommendation.headroom else None
        if limit is not None and (self.device.torch_device.type == "cpu" or limit < self.device.total_bytes()):
            self.device.limit(limit)

    def _build_model(self, workload: Workload) -> nn.Module:
        model = build_model(self.spec, workload).to(self.device.torch_device)
        if self.spec.compile:
            model.compile()
        return model

    def _identity(self) -> str:
        """What must be the same for a checkpoint to be this run's: everything the weights depend on."""
        return canonical_json(
            {
                "spec": self.spec.model_dump(mode="json"),
                "effective_batch_size": self.recommendation.effective_batch_size.achieved,
                "seed": self.request.seed,
                "updates": self.request.updates if self.spec.schedule.name != "constant" else None,
                "samples": len(self.data),
            }
        )

    def resume(self) -> int | None:
        """Go on from the newest checkpoint, if there is one; returns its update.

        Raises:
            CheckpointError: when it cannot be read or belongs to another run.
        """
        with self.device.without_limit():
            found = self.checkpoints.newest()
            if found is None:
                return None
            update, state = found
            self._restore(state)
        return update

    def run(self, report: ProgressSink, should_stop: Callable[[], bool] = lambda: False) -> RunOutcome:
        """Train until all updates are made or ``should_stop`` answers true; a checkpoint is written either way.

        What the device or the workload raises comes out as it is; the last checkpoint stays.
        """
        while self.position.update < self.request.updates and not should_stop():
            report(self._update())
            if self.position.update % self.request.checkpoint_every == 0:
                self._save()
        self._save()
        return RunOutcome.SUCCEEDED if self.position.update >= self.request.updates else RunOutcome.STOPPED

    def save_weights(self) -> str:
        """Write the weights; returns their SHA-256."""
        return save_weights(self.model, self.paths.weights)

    # --- one update ---

    def _update(self) -> TrainingProgress:
        began = time.perf_counter()
        indices = self._next_window()
        sizes = self._split(len(indices))
        rate = float(self.schedule.get_last_lr()[0])
        outcome = self.engine.update([self.data.batch(part) for part in _cut(indices, sizes)])
        if not outcome.skipped:
            self.schedule.step()
        self._advance(len(indices), outcome)
        return self._progress(outcome, rate, sizes, time.perf_counter() - began)

    def _next_window(self) -> tuple[int, ...]:
        """The next samples of this epoch: the effective batch, or what is left of the epoch."""
        order = epoch_order(self.request.seed, self.position.epoch, len(self.data))
        batch = self.recommendation.effective_batch_size.achieved
        return tuple(order[self.position.committed : self.position.committed + batch].tolist())

    def _split(self, samples: int) -> tuple[int, ...]:
        return balanced_split(samples, -(-samples // self.micro_batch_size))

    def _advance(self, samples: int, outcome: UpdateReport) -> None:
        position = self.position
        position.update += 1
        position.seen += samples
        position.committed += samples
        position.loss = _finite(outcome.loss)
        if position.committed >= len(self.data):
            position.epoch, position.committed = position.epoch + 1, 0

    def _progress(self, outcome: UpdateReport, rate: float, sizes: tuple[int, ...], seconds: float) -> TrainingProgress:
        return TrainingProgress(
            update=self.position.update,
            updates=self.request.updates,
            loss=_finite(outcome.loss),
            terms={name: _finite(value) for name, value in outcome.terms.items()},
            learning_rate=rate,
            gradient_norm=outcome.gradient_norm,
            skipped=outcome.skipped,
            samples=sum(sizes),
            micro_batch_sizes=sizes,
            samples_seen=self.position.seen,
            epoch=self.position.epoch,
            seconds=seconds,
            peak_bytes=self.device.peak_bytes(),
        )

    # --- checkpoints ---

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this update."""
        with self.device.without_limit():
            if self.paths.checkpointed_update() != self.position.update:
                self.checkpoints.save(self.position.update, self._state())

    def _state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.engine.scaler.state_dict(),
            "random": random_state(self.device.torch_device),
            "position": dict(vars(self.position)),
        }

    def _restore(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.engine.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if state["scaler"]:
            self.engine.scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"], self.device.torch_device)
        self.position = Position(**state["position"])


def trainable_micro_batch_size(recommendation: Recommendation) -> int:
    """The largest micro-batch a run of this recommendation may use.

    Raises:
        TrainingError: when nothing fits, or when it is a plan for several ranks.
    """
    if not recommendation.feasible or recommendation.micro_batch_size is None:
        raise TrainingError(f"this recommendation is not feasible: {recommendation.infeasible_reason}")
    if recommendation.world_size > 1:
        raise TrainingError(
            f"this recommendation is for {recommendation.world_size} ranks, and training runs in one process: tune "
            "with world_size 1, or use the plan with your own distributed launcher"
        )
    return recommendation.micro_batch_size


def _cut(indices: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(indices[start : start + size])
        start += size
    return parts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
