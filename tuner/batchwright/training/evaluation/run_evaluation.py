"""The evaluations of a run: after which updates, the best weights, early stopping, and the state of checkpoints."""

import time
from collections.abc import Callable
from typing import Any

from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.training import EvaluationReport, EvaluationSummary, TrainedFigures
from batchwright.training.evaluation.evaluation_sums import figures
from batchwright.training.evaluation.evaluator import Evaluator
from batchwright.training.launching.run_log import format_figure
from batchwright.training.micro_batches.loss_window import sum_by_name

_SMALLER_IS_BETTER = {"loss", "perplexity"}


class RunEvaluation:
    """The evaluations of a run. All ranks decide alike.

    The weights before the first update are evaluated for comparison, and are never the best ones.
    """

    def __init__(self, evaluation: EvaluationSpec, evaluator: Evaluator, updates: int) -> None:
        self.evaluator = evaluator
        self._evaluation = evaluation
        self._updates = updates
        self._count = 0
        self._first: EvaluationReport | None = None
        self._best: EvaluationReport | None = None
        self._last: EvaluationReport | None = None
        self._reference: float | None = None
        """The best figure, improved by more than ``min_delta`` each time."""
        self._without_improvement = 0
        self._unreported: list[EvaluationReport] = []

    def is_due(self, update: int) -> bool:
        """Return whether the weights after ``update`` updates are to be evaluated, and were not."""
        if self._last is not None and self._last.update >= update:
            return False
        every = self._evaluation.every
        return update in {0, self._updates} or (every is not None and update % every == 0)

    def evaluate(self, update: int, should_stop: Callable[[], bool]) -> bool:
        """Evaluate the weights after ``update`` updates. Return whether that ended, and was not stopped."""
        began, trained = time.perf_counter(), None
        if self._evaluation.weights == "both":
            trained = self._measure(update, should_stop, averaged=False)
            if trained is None:
                return False
        found = self._measure(update, should_stop, averaged=self._evaluation.uses_averages)
        if found is None:
            return False
        value, best = self._value(found), None if self._best is None else self._value(self._best)
        is_better = value is not None and (best is None or self._gain(value, best) > 0.0)
        report = found.model_copy(
            update={
                "trained": trained and TrainedFigures(loss=trained.loss, terms=trained.terms, metrics=trained.metrics),
                "splits": (() if trained is None else trained.splits) + found.splits,
                "is_best": update > 0 and is_better,
                "seconds": time.perf_counter() - began,
            }
        )
        self._count += 1
        self._first = self._first or report
        self._last = report
        self._best = report if report.is_best else self._best
        if update:
            self._judge(report)
        self._unreported.append(report)
        return True

    def _measure(self, update: int, should_stop: Callable[[], bool], *, averaged: bool) -> EvaluationReport | None:
        """Evaluate the trained weights or their averages. Return None if that was stopped."""
        began = time.perf_counter()
        shares, of_library = self.evaluator.run(should_stop, averaged=averaged)
        if any(share.is_stopped for share in shares):
            return None
        found = figures(shares, self._evaluation.metrics, of_library)
        failure = next((share.failure for share in shares if share.failure is not None), None)
        return EvaluationReport(
            update=update,
            loss=found.loss if failure is None else None,
            terms=found.terms if failure is None else {},
            weights=sum_by_name(share.weights for share in shares),
            metrics=found.metrics if failure is None else {},
            of_averages=averaged,
            samples=sum(share.samples for share in shares),
            micro_batch_size=max(share.largest for share in shares),
            splits=tuple(split for share in shares for split in share.splits),
            message=None if failure is None else f"a single held-out sample did not fit: {failure}",
            seconds=time.perf_counter() - began,
        )

    def _value(self, report: EvaluationReport | TrainedFigures) -> float | None:
        name = self._evaluation.monitor
        return report.loss if name == "loss" else report.metrics.get(name)

    def _gain(self, value: float, reference: float) -> float:
        gain = value - reference
        return -gain if self._evaluation.monitor in _SMALLER_IS_BETTER else gain

    def _judge(self, report: EvaluationReport) -> None:
        """Count an evaluation for early stopping."""
        if report.message is not None:  # without figures it says nothing about the weights
            return
        value, stopping = self._value(report), self._evaluation.early_stopping
        least = 0.0 if stopping is None else stopping.min_delta
        if value is not None and (self._reference is None or self._gain(value, self._reference) > least):
            self._reference, self._without_improvement = value, 0
        else:
            self._without_improvement += 1

    @property
    def uses_averages(self) -> bool:
        """True if the best weights are moving averages."""
        return self._evaluation.uses_averages

    @property
    def best_update(self) -> int | None:
        """The update of the best evaluation; None before the first one after an update."""
        return None if self._best is None else self._best.update

    @property
    def stops_early(self) -> bool:
        """True if the run has to end, because the monitored figure does not improve."""
        stopping = self._evaluation.early_stopping
        return stopping is not None and self._without_improvement >= stopping.patience

    @property
    def _has_stopped_early(self) -> bool:
        """True if the run ends before its last update."""
        return self.stops_early and self._last is not None and self._last.update < self._updates

    def take_reports(self) -> tuple[EvaluationReport, ...]:
        """The evaluations that were not taken yet, for the progress of the run."""
        taken, self._unreported = tuple(self._unreported), []
        return taken

    def summary(self) -> EvaluationSummary:
        """The evaluations so far."""
        return EvaluationSummary(
            monitor=self._evaluation.monitor,
            weights=self._evaluation.weights,
            held_out_samples=len(self.evaluator),
            evaluations=self._count,
            first=self._first,
            best=self._best,
            last=self._last,
            stopped_early=self._has_stopped_early,
            message=self._in_words(),
        )

    def _in_words(self) -> str:
        name, last, best = self._evaluation.monitor, self._last, self._best
        if last is None:
            return "The weights have not been evaluated yet"
        samples = f"{len(self.evaluator):,} held-out {'sample' if len(self.evaluator) == 1 else 'samples'}"
        averages = " of the moving averages" if last.of_averages else ""
        text = f"On {samples} the {name}{averages} is {format_figure(self._value(last))} after update {last.update}"
        if self._first is not None and self._first.update < last.update:
            text += f", from {format_figure(self._value(self._first))} after update {self._first.update}"
        if best is not None and best.update != last.update:
            text += f"; the best is {format_figure(self._value(best))} after update {best.update}"
        if last.trained is not None:
            text += f"; for the trained weights it is {format_figure(self._value(last.trained))}"
        if self._has_stopped_early:
            count = self._without_improvement
            text += f". The run ended early: {count} evaluations in a row did not improve the {name}"
        return text

    # --- checkpoints ---

    def state(self) -> dict[str, Any]:
        """Plain state for a checkpoint."""
        return {
            "compares": self._compared(),
            "count": self._count,
            "first": _plain(self._first),
            "best": _plain(self._best),
            "last": _plain(self._last),
            "reference": self._reference,
            "without improvement": self._without_improvement,
            "unreported": [_plain(report) for report in self._unreported],
        }

    def load_state(self, state: dict[str, Any]) -> str | None:
        """Continue from the state of a checkpoint. Return a note if its figures do not compare with those to come.

        After another figure or other held-out data, the choice of the best weights begins anew.
        """
        self._count = state["count"]
        self._unreported = [EvaluationReport.model_validate(report) for report in state["unreported"]]
        changed = [name for name, value in self._compared().items() if state["compares"][name] != value]
        if changed:
            return (
                f"`evaluation.{changed[0]}` has changed, so earlier evaluations are not comparable: the best "
                "weights and early stopping count from here on"
            )
        reports = (state[name] for name in ("first", "best", "last"))
        self._first, self._best, self._last = (saved and EvaluationReport.model_validate(saved) for saved in reports)
        self._reference, self._without_improvement = state["reference"], state["without improvement"]
        return None

    def _compared(self) -> dict[str, Any]:
        """The fields of the spec that must stay equal for evaluations to compare, other than those of a split."""
        return self._evaluation.model_dump(mode="json", include={"monitor", "data", "weights"})


def _plain(report: EvaluationReport | None) -> dict[str, Any] | None:
    return None if report is None else report.model_dump(mode="json")
