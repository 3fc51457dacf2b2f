"""Forward passes over held-out samples, without gradients, under the memory limit of the run.

Without gradients no activation is kept for a backward pass, so a batch takes less than the training step of as many
samples, which a probe has proven. A batch of the worst case proves the size before the first evaluation of a run, and
so proves a larger size of the user's too. Where a batch does not fit, it is halved and run again, as training does with
a micro-batch; where a single sample does not fit, the evaluation has no figures, and training goes on.

Ranks that share one model (FSDP) wait for each other in every pass. There an out-of-memory error ends the processes, as
in training, and the run restarts from its checkpoint with half the size.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from batchwright.errors import FieldProblem, InvalidSizeError, OutOfMemoryError, SpecError, WorkloadError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.planning.accumulation import balanced_split
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.training import MicroBatchSplit
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.batch_schedule import cut
from batchwright.training.data.base import TrainingData
from batchwright.training.data.seeding import longest_first
from batchwright.training.evaluation.evaluation_sums import BatchSums, EvaluationShare, Scores
from batchwright.training.evaluation.library_metrics import LibraryMetrics
from batchwright.training.micro_batches.loss_window import named_terms
from batchwright.training.micro_batches.nested_batches import to_device
from batchwright.training.micro_batches.rng_state import RandomState
from batchwright.training.update_engine import UpdateEngine, autocast, averages_as_weights
from batchwright.workloads.base import (
    Batch,
    LabelScores,
    LossTerms,
    RewardScores,
    ScoresLabels,
    ScoresRewards,
    Workload,
)
from batchwright.workloads.build import build_workload
from batchwright.workloads.required_packages import needs_labels

_EPOCH = 0
"""Epoch of held-out samples: random choices of the user's code are the same in every evaluation."""


class Evaluator:
    """The held-out samples of a run and the forward passes over them. All ranks call the same methods.

    Each rank evaluates a share, and all receive the shares of all. The labels of ``workload`` must not be smoothed.

    Attributes:
        largest: samples of the largest batch that may still be tried on this rank.
        failed: size of the last batch that did not fit; None when all did.

    Raises:
        SpecError: when a metric needs labels, and the workload has none.
    """

    def __init__(  # noqa: PLR0913 - a run's parts
        self,
        spec: WorkloadSpec,
        evaluation: EvaluationSpec,
        workload: Workload,
        data: TrainingData,
        *,
        engine: UpdateEngine,
        memory: MemoryDevice,
        ranks: Ranks,
        micro_batch_size: int,
        sharded: bool,
        seed: int,
    ) -> None:
        self._spec = spec
        self._workload = workload
        self._score = _scoring(workload, evaluation)
        self._kind_of_scores = RewardScores if isinstance(workload, ScoresRewards) else LabelScores
        self._metrics = evaluation.metrics
        self._data = data
        self._engine = engine
        self._memory = memory
        self._ranks = ranks
        self._sharded = sharded
        self._seed = seed
        shares = balanced_split(len(data), ranks.size)
        self._indices = longest_first(cut(tuple(range(len(data))), shares)[ranks.rank], data.lengths)
        self._most = shares[0]
        requested = evaluation.micro_batch_size or micro_batch_size
        self.largest = min(self._most, min(requested, micro_batch_size) if sharded else requested)
        self._requested = self.largest
        self.failed: int | None = None
        self._is_proven = False
        self._splits: list[MicroBatchSplit] = []

    def __len__(self) -> int:
        """Number of held-out samples of all ranks."""
        return len(self._data)

    def proof(self) -> tuple[int, int] | None:
        """The size that a batch of the worst case has proven, and the one requested; None before the first evaluation.

        The proven one is smaller where a batch did not fit.
        """
        return (self.largest, self._requested) if self._is_proven else None

    def accept_proof(self, proof: tuple[int, int] | None) -> None:
        """Continue with the size that an earlier process of the run has proven, unless a smaller one is requested.

        A larger one is to be proven, if none has failed.
        """
        if proof is None:
            return
        proven, requested = proof
        self._is_proven = proven < requested or self.largest <= proven
        self.largest = min(self.largest, proven) if self._is_proven else self.largest

    def run(
        self, should_stop: Callable[[], bool], *, averaged: bool = False
    ) -> tuple[list[EvaluationShare], dict[str, float]]:
        """Evaluate all held-out samples. Return the shares of all ranks, and the figures of ``torchmetrics``.

        The first time a batch of the worst case is run before, of the largest size that may be tried. ``should_stop``
        is called before every batch.

        Raises:
            WorkloadError: when the loss breaks its contract.
            OutOfMemoryError: with ``sharded``, when a batch does not fit.
            PeerError: when another rank failed.
        """
        self._splits = []
        totals = self._no_sums()
        engine = self._engine
        averages = averages_as_weights(engine.parameters, engine.averages, self._memory) if averaged else nullcontext()
        with averages, self._without_trace():
            if self._sharded:  # ranks waiting inside a pass cannot be notified of a failure, which ends the process
                shares = self._ranks.gather(self._own_share(totals, lambda: any(self._ranks.gather(should_stop()))))
            else:
                shares = self._ranks.run_collectively(lambda: self._own_share(totals, should_stop))
        ended = all(share.failure is None and not share.is_stopped for share in shares)
        return shares, totals.library.compute() if ended else {}

    def _no_sums(self) -> BatchSums:
        return BatchSums(LibraryMetrics(self._metrics, self._ranks))

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Switch the model to evaluation, uncompiled, and restore modes and random numbers at the end.

        Buffers are restored too, but for those of a model that ranks share.
        """
        model, snapshot = self._engine.model, self._engine.accumulation.snapshot
        modes = [(module, module.training) for module in model.modules()]
        random = None if snapshot is not None else RandomState.capture(self._engine.device)
        if snapshot is not None:
            snapshot.capture()
        model.eval()
        try:
            with _uncompiled():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            if snapshot is not None:
                snapshot.restore()
            if random is not None:
                random.restore(self._engine.device)
            for module in model.modules():
                if isinstance(module, FSDPModule):  # a forward pass alone leaves the full parameters
                    module.reshard()

    # --- this rank's share ---

    def _own_share(self, totals: BatchSums, should_stop: Callable[[], bool]) -> EvaluationShare:
        failure, is_stopped = None, False
        if not self._is_proven:
            failure = self._prove()
            self._is_proven = True
        queue = deque(self._batches(self._indices))
        while queue and failure is None:
            if is_stopped := should_stop():
                break
            indices = queue.popleft()
            error = self._attempt(lambda: self._load(indices), totals, len(indices))  # noqa: B023 - called at once
            if error is None:
                continue
            failure = self._divide(error, len(indices))
            del error  # its traceback keeps the tensors of the failed pass alive
            self._free()
            queue = deque(self._batches(tuple(index for batch in (indices, *queue) for index in batch)))
        if self._sharded and not is_stopped:
            is_stopped = self._run_padding(should_stop)
        return totals.share(largest=self.largest, splits=self._splits, failure=failure, is_stopped=is_stopped)

    def _prove(self) -> str | None:
        """Run a batch of the worst case, and halve its size until it fits. Return the message if nothing fits."""
        while True:
            size = self.largest
            error = self._attempt(lambda: self._workload.make_batch(size), self._no_sums(), size)  # noqa: B023 - called at once
            if error is None:
                return None
            failure = self._divide(error, size)
            del error
            self._free()
            if failure is not None:
                return failure

    def _batches(self, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
        steps = -(-len(indices) // self.largest)
        return cut(indices, balanced_split(len(indices), steps)) if steps else []

    def _run_padding(self, should_stop: Callable[[], bool]) -> bool:
        """Run a batch of one sample, whose loss is ignored, if another rank has one more: passes need all ranks.

        Return whether the run must stop.
        """
        if -(-self._most // self.largest) <= len(self._batches(self._indices)):
            return False
        if should_stop():
            return True
        error = self._attempt(lambda: self._load(self._indices[:1]), self._no_sums(), 1)
        if error is not None:
            raise error
        return False

    def _load(self, indices: tuple[int, ...]) -> Batch:
        return self._data.load(_EPOCH, indices, self._seed)

    def _attempt(self, load: Callable[[], Batch], totals: BatchSums, samples: int) -> Exception | None:
        """Run one batch. Return its error, to be handled after the ``except`` block."""
        try:
            with torch.no_grad():
                scores, terms = self._forward(load(), samples)
                totals.add(terms, scores, samples)
        except Exception as error:  # noqa: BLE001 - any error may be an out-of-memory error
            return error
        return None

    def _forward(self, batch: Batch, samples: int) -> tuple[Scores | None, LossTerms]:
        floating = torch.bfloat16 if self._spec.precision == "bf16" else None
        moved = to_device(batch, self._engine.device, floating)
        with autocast(self._spec, self._engine.device):
            if self._score is None:
                return None, named_terms(self._workload.loss_terms(self._engine.model, moved), samples)
            scores = self._score(self._engine.model, moved)
        if not isinstance(scores, self._kind_of_scores):
            raise WorkloadError(f"score() returned a {type(scores).__name__}: it must be a LabelScores")
        return scores, scores.terms

    def _divide(self, error: Exception, size: int) -> str | None:
        """Lower the size after a batch did not fit. Return the device's message if it was a single sample.

        Raises:
            Exception: ``error`` itself, when it is not an out-of-memory error, or ranks share the model.
        """
        oom_error = self._memory.translate(error)
        if not isinstance(oom_error, (OutOfMemoryError, InvalidSizeError)):
            raise error
        self.failed = size
        if self._sharded:
            raise error
        if size == 1:
            return str(oom_error)
        parts = balanced_split(size, 2)
        self.largest = parts[0]
        self._splits.append(MicroBatchSplit(rank=self._ranks.rank, size=size, parts=parts, message=str(oom_error)))
        return None

    def _free(self) -> None:
        self._memory.synchronize()
        self._memory.release()


def evaluated_workload(spec: WorkloadSpec, workload: Workload) -> Workload:
    """The workload whose labels are not smoothed, so that a loss compares with those of other runs."""
    return build_workload(spec.model_copy(update={"label_smoothing": 0.0})) if spec.label_smoothing else workload


def _scoring(workload: Workload, evaluation: EvaluationSpec) -> Callable[[nn.Module, Batch], Scores] | None:
    """The workload's scoring, where a metric needs labels or rewards."""
    if isinstance(workload, ScoresRewards):
        return workload.score_rewards if evaluation.metrics else None
    if not needs_labels(evaluation):
        return None
    if not isinstance(workload, ScoresLabels):
        message = f"need labels and logits, from score(model, batch), which {type(workload).__name__} lacks"
        raise SpecError([FieldProblem("evaluation.metrics", message)])
    return workload.score


def _uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled code runs as it was written.

    The sizes of batches that compiled code has seen decide how it compiles the next one: the training step would be
    compiled for a batch of any size, and take other memory than a probe has measured.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and an import would take memory of the limit
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
