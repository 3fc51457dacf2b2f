"""The training loop: windows of exactly the effective batch, one optimizer update each, checkpoints between them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from batchwright.errors import CheckpointError, NotFiniteError
from batchwright.schemas.training import RunOutcome, TrainingProgress
from batchwright.training.assembly import RunParts, seed_rank
from batchwright.training.batch_schedule import Position, WindowQueue, micro_batches_of
from batchwright.training.checkpoints import State, Weights, with_tied_names
from batchwright.training.data.loading import WORKER_BYTES, WindowLoader
from batchwright.training.finite_updates import FiniteUpdates
from batchwright.training.fsdp import full_tensors, load_optimizer, load_weights, sharded_like
from batchwright.training.launching.run_log import log
from batchwright.training.micro_batches.loss_window import finite_or_none
from batchwright.training.micro_batches.rng_state import RandomState
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.training.run_noise_scale import RunNoiseScale
from batchwright.training.trained_model import ModelWriter
from batchwright.units import format_bytes
from batchwright.workloads.adapters.adapter_output import base_state, trained_state
from batchwright.workloads.base import Batch
from batchwright.workloads.pretrained.model_card import model_card

ProgressSink = Callable[[TrainingProgress], None]


class Trainer:
    """The training loop of a run on this rank's device. All ranks call the same methods in the same order.

    Attributes:
        position: progress of the run.
        notes: facts that the user should know of the run, a sentence each.
        noise_scale: measurements of the gradient noise.
        finite: updates whose loss or gradient was not finite.
        evaluation: evaluations on held-out samples; None where none were requested.
    """

    def __init__(self, parts: RunParts) -> None:
        self.position = Position()
        self.notes = parts.notes
        self.request = parts.request
        self.ranks = parts.ranks
        self.model = parts.engine.model
        self.engine = parts.engine
        self.sharded = parts.sharded
        self._parts = parts
        self._device = parts.device
        self._checkpoints = parts.checkpoints
        self._schedule = parts.batch_schedule
        self.noise_scale = RunNoiseScale(parts.request, self._schedule)
        self.finite = FiniteUpdates(self.model)
        self.evaluation = parts.evaluation
        self._saved: int | None = None
        self._lacks_evaluation = False
        """True while the newest checkpoint does not have the newest evaluation."""
        self._newest: TrainingProgress | None = None
        self._is_reported = True
        """False while the newest update was not reported: it waits for its evaluation."""

    def resume(self) -> int | None:
        """Resume from the newest intact checkpoint, if there is one. Return its update.

        Rank 0 compares the files with their checksums and chooses a checkpoint for all ranks. A newer checkpoint that
        is damaged is named in ``notes``.

        Raises:
            CheckpointError: when there are checkpoints and none is intact, or one belongs to another run.
            PeerError: when another rank cannot read the checkpoint.
        """
        first = not self.ranks.rank
        with self._device.without_limit():
            found = self.ranks.run_collectively(lambda: self._checkpoints.newest() if first else None)[0]
            if found is None:
                return None
            self.notes += found.notes
            loaded: list[tuple[Weights, State]] = []
            self.ranks.run_collectively(lambda: loaded.append(self._checkpoints.load(found.update, checked=first)))
            self._restore(*loaded.pop())
            self._parts.coupling.require_separate(accumulates=self._parts.accumulates)
        self._saved = found.update
        return found.update

    def run(self, report: ProgressSink, should_stop: Callable[[], bool] = lambda: False) -> RunOutcome:
        """Train until all updates are made, the run ends early, or ``should_stop`` returns true on a rank.

        A checkpoint is written in each case. Errors of the device and the workload are raised unchanged, and the last
        checkpoint is kept. ``report`` is called once for every update, on rank 0, when its evaluation is over;
        ``should_stop`` before every update.

        Raises:
            NotFiniteError: when the loss, the gradient or the weights are not finite. No such weights are written.
        """
        updates = self.request.updates
        windows = WindowQueue(
            self._schedule.windows(self.position, updates, self.largest_micro_batch, equal_counts=self.sharded)
        )
        loader = WindowLoader(self._parts.data, windows, workers=self._workers(), seed=self.request.seed)
        batches = iter(loader)  # kept here: dropping the iterator would end the workers under the limit
        try:
            try:
                self._run(batches, windows, report, should_stop)
            finally:
                with self._device.without_limit():  # ending the workers may start threads
                    loader.close()
            if self._is_over() and (note := self.finite.conclude(self._newest)) is not None:
                self.notes.append(note)
            self._save()
        except NotFiniteError as error:
            self._report(report)
            raise NotFiniteError(self.finite.describe(error, self._saved)) from None
        return RunOutcome.SUCCEEDED if self._is_over() and not self._is_evaluation_due() else RunOutcome.STOPPED

    def _is_over(self) -> bool:
        """Return whether no further update is to be made."""
        stops_early = self.evaluation is not None and self.evaluation.stops_early
        return self.position.update >= self.request.updates or stops_early

    def _is_evaluation_due(self) -> bool:
        return self.evaluation is not None and self.evaluation.is_due(self.position.update)

    def _is_checkpoint_due(self) -> bool:
        update = self.position.update
        return update > 0 and (update % self.request.checkpoint_every == 0 or update >= self.request.updates)

    def _conclude_update(self, report: ProgressSink, should_stop: Callable[[], bool]) -> bool:
        """Evaluate, report and save the newest update. Return False if the run must stop within the evaluation.

        A checkpoint that is due is written before the evaluation, which may take long; the evaluation is added to it.
        A process that resumes from the checkpoint without that evaluates the same weights again.
        """
        if self.evaluation is not None and self._is_evaluation_due():
            if self._is_checkpoint_due():
                self._save()
            self._lacks_evaluation = self.evaluation.evaluate(self.position.update, should_stop)
            if not self._lacks_evaluation:
                return False
        is_best = self._report(report)
        if is_best or self._is_checkpoint_due():
            self._save()
        return True

    def _report(self, report: ProgressSink) -> bool:
        """Report the newest update with its evaluations, once. Return whether one of them is the best so far.

        Evaluations of an update that was reported without them are reported with the next one, if there is one.
        """
        if self._newest is None or (self._is_reported and not self._is_over()):
            return False
        found = () if self.evaluation is None else self.evaluation.take_reports()
        if found or not self._is_reported:
            self._newest = self._newest.model_copy(update={"evaluations": (*self._newest.evaluations, *found)})
            self._is_reported = True
            if not self.ranks.rank:
                report(self._newest)
        return any(evaluation.is_best for evaluation in found)

    @property
    def failed_micro_batch(self) -> int | None:
        """Size of the last micro-batch that did not fit, in training or an evaluation; None when all did."""
        failed = self.engine.accumulation.failed_micro_batch
        return self.evaluation.evaluator.failed if failed is None and self.evaluation is not None else failed

    def _workers(self) -> int:
        """Number of worker processes: as many as requested, within half of the memory that the plan leaves free.

        The other half is for the loaded batches.
        """
        requested, headroom = self.request.workers, self._parts.recommendation.headroom
        if not self._device.traits.counts_host_memory or headroom is None or not requested:
            return requested
        free = headroom.limit_bytes - headroom.peak_bytes
        maximum = max(1, free // 2 // WORKER_BYTES)
        if requested > maximum:
            self.notes.append(
                f"{maximum} of the {requested} requested workers load data: each takes "
                f"{format_bytes(WORKER_BYTES)}, and the plan leaves {format_bytes(free)} of the memory limit "
                "free; the weights do not change"
            )
        return min(requested, maximum)

    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch that may still be tried on this rank."""
        return self.engine.accumulation.largest_micro_batch or self._parts.micro_batch_size

    def _run(
        self,
        loaded_batches: Iterator[list[Batch]],
        windows: WindowQueue,
        report: ProgressSink,
        should_stop: Callable[[], bool],
    ) -> None:
        while self._conclude_update(report, should_stop) and not self._is_over():
            began = time.perf_counter()
            batches: list[Batch] = []
            if any(self.ranks.run_collectively(lambda: _load(loaded_batches, batches, should_stop))):  # noqa: B023 - called at once
                return
            micro_batches = micro_batches_of(self._parts.data, windows.pop(), batches, self.request.seed)
            self._newest, self._is_reported = self._update(micro_batches, began), False
            self.finite.add(self._newest)

    def save_weights(self) -> str:
        """Write the weights, and their moving averages if the spec requests them. Return the SHA-256 of the weights.

        Rank 0 writes; the other ranks return an empty text.
        """
        weights, paths = self._weights(), self._parts.paths
        averages = full_tensors(self.engine.averages_by_name(), keep=not self.ranks.rank)
        base = full_tensors(base_state(self.model), keep=not self.ranks.rank) if self._parts.writes_base else {}
        if self.ranks.rank:
            return ""
        found, evaluation = self._parts.recommendation, self.evaluation.summary() if self.evaluation else None
        card = model_card(found, self.position.update, evaluation)
        write = ModelWriter(found.request.workload, paths.base, card, self._parts.data.classes)
        with self._device.without_limit():
            if base:
                write.write_base(base)
            digest = write(weights, paths.weights, paths.pretrained)  # before the others, for a disk that fills
            if averages:
                write({**weights, **averages}, paths.average_weights, paths.pretrained_average)
            self._write_best(write)
            return digest

    def _write_best(self, write: ModelWriter) -> None:
        """Write the weights of the best evaluation, from its checkpoint; a note says if that cannot be read."""
        best = None if self.evaluation is None else self.evaluation.best_update
        if self.evaluation is None or best is None:
            return
        try:
            weights = with_tied_names(self._checkpoints.load_weights(best), self.model)
            if self.evaluation.uses_averages:
                weights |= self.engine.averages_by_name(self._checkpoints.load_averages(best))
        except CheckpointError as error:
            self.notes.append(f"the weights of the best evaluation are not written: {error}")
        else:
            write(weights, self._parts.paths.best_weights, self._parts.paths.pretrained_best)

    # --- one update ---

    def _update(self, micro_batches: Sequence[MicroBatch], began: float) -> TrainingProgress:
        rate = float(self._parts.lr_scheduler.get_last_lr()[0])
        samples, epoch, number = self._schedule.size(self.position), self.position.epoch, self.position.update + 1
        # the gradient of a micro-batch is no sum over samples if the loss couples them
        measures_noise = self._parts.coupling.note is None and self.noise_scale.is_due(number, samples)
        outcome = self.engine.update(micro_batches, measures_noise=measures_noise)
        if not outcome.skipped:
            self._parts.lr_scheduler.step()
        if outcome.splits:
            self._parts.coupling.note_splits()
        self.position = replace(self._schedule.advanced(self.position), loss=finite_or_none(outcome.loss))
        peak = max(self.ranks.gather(self._device.peak_bytes()))
        return TrainingProgress(
            update=self.position.update,
            updates=self.request.updates,
            loss=finite_or_none(outcome.loss),
            terms={name: finite_or_none(value) for name, value in outcome.terms.items()},
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
            noise_scale=self.noise_scale.add(number, outcome.noise),
        )

    # --- checkpoints ---

    def _save(self) -> None:
        """Write a checkpoint, or add the newest evaluation to that of this update. Nothing if both are there.

        Rank 0 writes, with the random state of all ranks.
        """
        update, is_new = self.position.update, self._saved != self.position.update
        if not is_new and not self._lacks_evaluation:
            return
        write: Callable[[], object]
        with self._device.without_limit():
            proofs = self.ranks.gather(None if self.evaluation is None else self.evaluation.evaluator.proof())
            if is_new:
                own = {
                    "random": RandomState.capture(self._device.torch_device).state_dict(),
                    "largest": self.largest_micro_batch(),
                }
                weights, state = self._weights(), {**self._state(), "ranks": self.ranks.gather(own), "proofs": proofs}
                best = None if self.evaluation is None else self.evaluation.best_update
                write = partial(self._write_checkpoint, weights, state, best)
            else:
                added = {**self._evaluation_state(), "proofs": proofs}
                write = partial(self._checkpoints.add_evaluation, update, added)
            self.ranks.run_collectively(lambda: None if self.ranks.rank else write())
        if is_new and not self.ranks.rank:
            log(f"checkpoint of update {update} written")
        self._saved, self._lacks_evaluation = update, False

    def _write_checkpoint(self, weights: Weights, state: State, best: int | None) -> None:
        update = self.position.update
        self.finite.require_finite(weights, update)
        self._checkpoints.save(update, weights, state, best)

    def _weights(self) -> Weights:
        """The weights that change: all of the model, or what is trained beside a frozen base."""
        state = trained_state(self.model) if self._parts.trains_adapter else self.model.state_dict()
        weights: Weights = full_tensors(dict(state), keep=not self.ranks.rank)
        return weights

    def _state(self) -> State:
        state: State = {
            "base_sha256": self._parts.base_sha256,
            "optimizer": self.engine.optimizer.state_dict(),
            "schedule": self._parts.lr_scheduler.state_dict(),
            "scaler": self.engine.scaler.state_dict(),
            "averages": list(self.engine.averages),
            "position": dict(vars(self.position)),
            "coupling": self._parts.coupling.state(),
            "noise scale": self.noise_scale.state(),
            "finite": self.finite.state(),
            **self._evaluation_state(),
        }
        gathered: State = full_tensors(state, keep=not self.ranks.rank)
        return gathered

    def _evaluation_state(self) -> State:
        """The state that an evaluation changes."""
        return {
            "evaluation": None if self.evaluation is None else self.evaluation.state(),
            "newest": None if self._newest is None else self._newest.model_dump(mode="json"),
            "reported": self._is_reported,
        }

    def _restore(self, weights: Weights, state: State) -> None:
        if not set(weights) <= set(self.model.state_dict()):
            raise CheckpointError(f"{self._checkpoints.directory} holds weights of another model")
        if state["base_sha256"] != self._parts.base_sha256:
            raise CheckpointError(
                f"{self._checkpoints.directory} was trained beside other frozen weights: SHA-256 "
                f"{state['base_sha256']}, and they now have {self._parts.base_sha256}. Give the model that the run "
                "began with"
            )
        load_weights(self.model, weights)
        load_optimizer(self.engine.optimizer, state["optimizer"])
        self._parts.lr_scheduler.load_state_dict(state["schedule"])
        if state["scaler"]:
            self.engine.scaler.load_state_dict(state["scaler"])
        for average, saved in zip(self.engine.averages, state["averages"], strict=True):
            average.copy_(sharded_like(saved, average))
        self.position = Position(**state["position"])
        self._parts.coupling.load_state(**state["coupling"])
        self.noise_scale.load_state(**state["noise scale"])
        self.finite.load_state(**state["finite"])
        if self.evaluation is not None and state["evaluation"] is not None:
            note = self.evaluation.load_state(state["evaluation"])
            self.notes += [] if note is None else [note]
        if state["newest"] is not None:
            newest = TrainingProgress.model_validate(state["newest"])
            self._newest = newest.model_copy(update={"updates": self.request.updates})
            self._is_reported = state["reported"]
        self._restore_this_rank(state["ranks"], state["proofs"])

    def _restore_this_rank(self, each_rank: list[State], proofs: list[tuple[int, int] | None] | None) -> None:
        """Restore a rank's own state; derive it if the number of ranks has changed."""
        largest = min(int(state["largest"]) for state in each_rank)
        if len(each_rank) == self.ranks.size:
            own = each_rank[self.ranks.rank]
            largest = largest if self.sharded else int(own["largest"])
            RandomState.from_state_dict(own["random"]).restore(self._device.torch_device)
            if self.evaluation is not None and proofs is not None:
                self.evaluation.evaluator.accept_proof(proofs[self.ranks.rank])
        elif not self.ranks.rank:
            RandomState.from_state_dict(each_rank[0]["random"]).restore(self._device.torch_device)
        else:
            seed_rank(self.request.seed, self.ranks, self.position.update)
        self.engine.accumulation.largest_micro_batch = min(largest, self._parts.micro_batch_size)


def _load(loaded_batches: Iterator[list[Batch]], into: list[Batch], should_stop: Callable[[], bool]) -> bool:
    """Load the next window's batches, unless the run must stop. Return whether it must."""
    if should_stop():
        return True
    into += next(loaded_batches)
    return False
