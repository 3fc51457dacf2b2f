"""Stands in for ``tuner.search`` until it is written: a bisection. Deleted then."""

from __future__ import annotations

from tuner.results import Outcome, ProbeResult, Proof
from tuner.search import Failure, SearchSpace


class Bisection:
    """Exponential, then binary."""

    warnings: tuple[str, ...] = ()

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.low, self.high = 0, space.bound + 1
        self.failure: Failure | None = None

    def ask(self) -> int | None:
        """Next size."""
        if self.failure or self.high - self.low <= 1:
            return None
        return (
            min(self.space.bound, max(1, self.low * 2)) if self.high > self.space.bound else (self.low + self.high) // 2
        )

    def tell(self, result: ProbeResult) -> None:
        """Outcome."""
        if result.outcome is Outcome.FIT:
            self.low = max(self.low, result.micro_batch_size)
        elif result.outcome is Outcome.OOM:
            self.high = min(self.high, result.micro_batch_size)
        else:
            self.failure = Failure("workload-error", result.message)

    @property
    def verdict(self) -> Proof | Failure | None:
        """Answer."""
        if self.failure:
            return self.failure
        if self.high - self.low > 1:
            return None
        bound = self.high > self.space.bound
        return Proof(
            fits=self.low, stopped_by="bound" if bound else "oom", next_size=None if bound else self.high, statement="x"
        )


def install() -> None:
    """Use it where the search is a stub."""
    import tuner.search
    import tuner.tuning

    try:
        tuner.search.MicroBatchSearch(SearchSpace(4, "x")).ask()
    except NotImplementedError:
        tuner.tuning.MicroBatchSearch = Bisection
