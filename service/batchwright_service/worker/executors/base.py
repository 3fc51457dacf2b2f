"""The interface of an executor, which runs one tuning or one job at a time on one device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchwright.driving.loop import TuningHooks, drive
from batchwright.driving.probe_runner import ProbeRunner, WorkloadRunner
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import RunProgress, TrainingResult

GraceSeconds = Callable[[], float | None]
"""Seconds left before the run must have stopped, or None if it need not stop. May fall from call to call."""

OnProgress = Callable[[Sequence[RunProgress]], None]
"""Receives the progress since the last call. Its exceptions end the run."""


@dataclass(frozen=True)
class TrainingRun:
    """A run to start, or to resume if its directory has checkpoints. A command is started anew."""

    directory: Path
    recommendation: Recommendation
    request: TrainingRequest
    reported: int = 0
    """The newest reported update. Later ones will be reported, also those that an earlier process made; of a command,
    all since its start."""
    devices: tuple[str, ...] = ()
    """The devices of the ranks, where each has one of its own; otherwise all share the device of the executor."""


class Executor(ABC):
    """Run work on ``device``. Calls block; they may come from any thread, one at a time.

    Subclasses implement training runs.

    Args:
        device: the device.
        runner: runs the probes of workloads. The executor owns it.
        commands: runs the probes of commands; ``runner`` too if absent.
    """

    def __init__(self, device: DeviceInfo, runner: WorkloadRunner, commands: ProbeRunner | None = None) -> None:
        self.device = device
        self._workloads = runner
        self._commands: ProbeRunner = runner if commands is None else commands
        self._closed = False

    def tune(self, tuning: TuningSession, hooks: TuningHooks, grace_seconds: GraceSeconds) -> None:
        """Run a tuning to its end, with the errors of ``batchwright.driving.loop.drive``.

        Raises:
            ProbeCancelledError: when ``grace_seconds`` requested a stop; nothing of a probe is left then.
        """
        runner = self._workloads if tuning.request.command is None else self._commands
        drive(tuning, runner, hooks, lambda: grace_seconds() is not None)

    @abstractmethod
    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Start or resume a run. STOPPED when ``grace_seconds``, or another process, requested a stop.

        No process of the run outlives this call, whether it returns or raises (``on_progress`` may raise).
        """

    def close(self) -> None:
        """End every process. Idempotent."""
        if not self._closed:
            self._closed = True
            self._workloads.close()
            self._commands.close()

    def lost_device(self) -> str | None:
        """Return a message when the device is lost, or None."""
        return None

    def memory_in_use(self) -> MemoryInUse | None:
        """Return the memory in use on the device, or None where it cannot be read."""
        return None

    def environment(self) -> dict[str, str]:
        """Return the environment variables of probes of workloads and of jobs; those of commands follow from them."""
        return self._workloads.environment()
