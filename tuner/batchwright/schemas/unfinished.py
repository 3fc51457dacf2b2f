"""A tuning that was stopped before its recommendation. Pure data, no torch."""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.base import Document, NonNegativeFloat, PositiveInt, parse_document, read_data
from batchwright.schemas.recommendation import UNFINISHED, Recommendation, StopReason
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from batchwright.units import counted

_STOPS: dict[StopReason, str] = {
    "interrupted": "Interrupted",
    "time-limit": "Stopped by the time limit",
    "error": "Ended by an error",
}


class UnfinishedTuning(Document):
    """A tuning that was stopped before its recommendation: `batchwright tune --resume` goes on from its probes.

    It has no plan and no proof, and is no recommendation.
    """

    kind: Literal["unfinished-tuning"] = UNFINISHED
    """The kind of this document."""
    schema_version: Literal[1] = 1
    """Version of this document's layout."""
    stopped_by: StopReason
    """Reason for the stop: a signal, the time limit of the whole tuning, or an error of the host or its device."""
    created_at: datetime
    """Time of the stop (UTC)."""
    request: TuningRequest
    """The request."""
    device: DeviceInfo
    """The device that was probed."""
    memory_limit_bytes: PositiveInt
    """Memory limit of the run, before the margin."""
    versions: dict[str, str]
    """Versions of software that affects memory."""
    fingerprint: str
    """SHA-256 of everything that the results depend on. Only a tuning with the same one can go on from them."""
    expected: ExpectedPeaks | None = None
    """The estimate that leads the search. None if there is none."""
    probes: tuple[ProbeResult, ...] = ()
    """The results so far, in the order of the runs."""
    seconds: NonNegativeFloat
    """Time from start to stop."""

    @property
    def statement(self) -> str:
        """Why and when it was stopped: ``Interrupted after 3 probes: 46 fits so far``."""
        if not self.probes:
            return f"{_STOPS[self.stopped_by]} before the first probe ended"
        fits = (probe.micro_batch_size for probe in self.probes if probe.outcome is Outcome.FIT)
        largest = max(fits, default=None)
        found = "none fitted so far" if largest is None else f"{largest} fits so far"
        return f"{_STOPS[self.stopped_by]} after {counted(len(self.probes), 'probe')}: {found}"


def load_unfinished(path: Path, name: str) -> UnfinishedTuning:
    """Read a tuning to go on with: an unfinished one, or a recommendation that was stopped with larger sizes untried.

    Raises:
        SpecError: when the file is neither.
    """
    data: Any = read_data(path, name)
    if not isinstance(data, dict) or "evidence" not in data:
        return parse_document(UnfinishedTuning, data, f"{name} {path}")
    found = parse_document(Recommendation, data, f"{name} {path}")
    stopped_by = found.evidence.proof.stopped_by
    if stopped_by not in {"interrupted", "time-limit"} or found.headroom is None:
        message = "is a tuning that has ended: train with it, or give it to `--warm-start-from`"
        raise SpecError([FieldProblem(str(path), message)], name)
    return UnfinishedTuning(
        stopped_by="interrupted" if stopped_by == "interrupted" else "time-limit",
        created_at=found.created_at,
        request=found.request,
        device=found.device,
        memory_limit_bytes=found.headroom.limit_bytes,
        versions=found.versions,
        fingerprint=found.fingerprint,
        expected=found.evidence.expected,
        probes=found.evidence.probes,
        seconds=found.timings.total_seconds,
    )
