"""The check for coupled samples in a training run, made once and recorded in its checkpoints."""

from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.coupling.admission import admit, measure_coupling
from batchwright.workloads.base import Workload

_UNCHECKED_SPLIT = (
    "micro-batches were divided after one did not fit. If the loss couples the samples of a batch, which was "
    "not checked, the division changes the loss"
)


class RunCoupling:
    """Check of a run, made once, whether accumulation would change its loss.

    If the tuning has made the check, its result is used.

    Args:
        recommendation: holds the spec and the tuning's evidence.
        request: may allow coupled samples.
        workload: computes the loss terms.
        device: the device to compare the loss on.
        ranks: rank 0 compares, and all ranks receive its result.
        notes: receives the warning, if there is one.

    Attributes:
        checked: whether the check was made.
        note: the warning; None without one.
    """

    def __init__(  # noqa: PLR0913 - a run's parts
        self,
        recommendation: Recommendation,
        request: TrainingRequest,
        workload: Workload,
        device: MemoryDevice,
        *,
        ranks: Ranks,
        notes: list[str],
    ) -> None:
        self.checked = False
        self.note: str | None = None
        self._recommendation = recommendation
        self._allowed = request.allow_batch_coupling or recommendation.request.allow_batch_coupling
        self._workload = workload
        self._device = device
        self._ranks = ranks
        self._notes = notes

    def require_separate(self, *, accumulates: bool) -> None:
        """Check the loss, unless it was checked before or the run does not accumulate. Every rank must call this.

        Raises:
            TrainingError: when accumulation would change the loss, and coupled samples are not allowed.
        """
        if not self.checked and accumulates:
            self._record(self._ranks.run_collectively(self._warning_of_rank_0)[0])

    def note_splits(self) -> None:
        """Warn that micro-batches were divided, if the loss was not checked because nothing was accumulated."""
        if not self.checked:
            self._record(_UNCHECKED_SPLIT)

    def state(self) -> dict[str, object]:
        """Plain state for a checkpoint."""
        return {"checked": self.checked, "note": self.note}

    def load_state(self, *, checked: bool, note: str | None) -> None:
        """Continue from the state of a checkpoint."""
        self._record(note)
        self.checked = checked

    def _record(self, note: str | None) -> None:
        self.checked, self.note = True, note
        if note is not None:
            self._notes.append(note)

    def _warning_of_rank_0(self) -> str | None:
        if self._ranks.rank:
            return None
        spec, evidence = self._recommendation.request.workload, self._recommendation.evidence
        check = evidence.coupling or measure_coupling(spec, self._workload, self._device)
        return admit(check, allowed=self._allowed)
