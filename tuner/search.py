"""The search for the largest micro-batch that fits. Pure ask/tell: sizes and outcomes in, the next size out."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.results import ProbeResult, Proof


@dataclass(frozen=True)
class SearchSpace:
    """The sizes worth probing: multiples of ``granularity`` up to ``bound`` (``bound`` itself where it is smaller)."""

    bound: int
    bound_reason: str
    granularity: int = 1
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Failure:
    """The search cannot end: a probe failed for a reason that is no matter of size."""

    reason: str
    message: str


class MicroBatchSearch:
    """Finds the largest size of a space that fits, and proves it."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space

    def ask(self) -> int | None:
        """The next size to probe, or none when the search is over."""
        raise NotImplementedError

    def tell(self, result: ProbeResult) -> None:
        """Take in what a probe found."""
        raise NotImplementedError

    @property
    def verdict(self) -> Proof | Failure | None:
        """The proven answer, or why there is none; nothing while the search goes on."""
        raise NotImplementedError
