"""Run the job of a command: the command itself with the figures of its plan, to its own end. No torch.

The subreaper of probes starts the command and ends its tree with this process (``launching``). The job is watched, and
not limited: Batchwright's own engine divides a micro-batch that reaches the limit and goes on, whereas a command would
lose its run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pydantic import ValidationError

from batchwright.commands.environment import cards_of_host, cards_of_ranks, injected_environment, processes_of
from batchwright.commands.job_outcomes import EndedJob, result_of_job
from batchwright.commands.job_progress import JobReports
from batchwright.commands.launching import FreshCommand, Launch
from batchwright.commands.templates import Figures, RenderedCommand, check_command, render
from batchwright.device_traits import job_environment
from batchwright.errors import TrainingError
from batchwright.hardware.failures import oom_texts
from batchwright.hardware.inventory import find_device
from batchwright.planning.proofs.counted_plans import whole_updates
from batchwright.schemas.command import UPDATES, CommandModel, CommandSpec
from batchwright.schemas.plans import Plan
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import CommandProgress, TrainingResult
from batchwright.system.disk_space import translate_full_disk
from batchwright.system.files import lock_directory, tail, write_atomically
from batchwright.system.processes import kernel_oom_kills, kill_group, propagated_environment
from batchwright.system.temporary_folders import TemporaryFolder, room_for_sockets
from batchwright.training.launching.run_directory import RunPaths

_LOCK_WAIT_SECONDS = 10.0
"""Longest wait for the lock of the folder, which a process that is being killed may still hold."""
_ENDING_SECONDS = 60.0
"""Longer than the kernel takes to end what can be killed."""
_ORPHANS_SECONDS = 0.05
"""Time between two looks for orphans, which may have started others."""
_OUTPUT_BYTES = 4000
_BLOCK_BYTES = 1 << 20


class CommandJob:
    """The job of a command in a folder, which keeps its recommendation, output, files and result.

    Leaving the context ends the command, if it still runs, with every process of its tree.

    Args:
        directory: the folder of the job.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = RunPaths(directory.absolute())
        self._stack = ExitStack()
        self._command: FreshCommand | None = None
        self._result: TrainingResult | None = None
        self._stopped_by: signal.Signals | None = None
        self._shown_bytes = self._log_start = 0
        self._is_killed = False

    def __enter__(self) -> CommandJob:  # noqa: PYI034 - not meant for subclassing
        """Return the job."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the command, write the result, and remove the files that only this process needs."""
        self.kill()
        try:
            self.poll()
        finally:
            self._stack.close()

    def start(self, recommendation: Recommendation, updates: int, rank_devices: Sequence[str] = ()) -> None:
        """Write the job's files and start the command.

        Args:
            recommendation: the recommendation for the command, which is feasible.
            updates: the number that `{updates}` becomes.
            rank_devices: the cards of the ranks, which see no others; empty for all of this host.

        Raises:
            TrainingError: when the recommendation is for no command, another process uses the folder, or the folder
                has the job of another command.
            SpecError: when the folder or the program of the command does not exist.
            DeviceError: when this host lacks the device of the recommendation.
        """
        spec, plan = recommendation.request.command, recommendation.plan
        if spec is None or plan is None:
            raise TrainingError(f"recommendation {recommendation.id} has no plan for a command")
        check_command(spec.model)
        device = find_device(recommendation.device.id)
        if not self._stack.enter_context(lock_directory(self.paths.directory, _LOCK_WAIT_SECONDS)):
            raise TrainingError(
                f"another process trains in {self.paths.directory}: stop that process, or choose another folder"
            )
        self._refuse_another_command(spec.model)
        self._recommendation, self._figures = recommendation, figures_of_plan(plan, updates)
        command = render(spec.model, self._figures, self.paths.directory, for_probe=False)
        with translate_full_disk(self.paths.directory):
            command.write_files()
            (self.paths.directory / "output").mkdir(exist_ok=True)
            self.paths.result.unlink(missing_ok=True)
            write_atomically(self.paths.recommendation, recommendation.model_dump_json(indent=2))
            self._shown_bytes = self._log_start = _size(self.paths.log)
        self._folder, self._launch = self._write_control_files(spec, command, device, rank_devices)
        self._reports = JobReports(self._folder / "events", updates if UPDATES in spec.model.placeholders else None)
        self._began, self._kills_before = time.monotonic(), kernel_oom_kills()
        self._command = FreshCommand(self._launch, self._folder)

    def _refuse_another_command(self, model: CommandModel) -> None:
        """Refuse a folder of another command, whose checkpoints this one might take for its own.

        Raises:
            TrainingError: naming the folder.
        """
        try:
            stored = Recommendation.model_validate_json(self.paths.recommendation.read_bytes())
        except (OSError, ValidationError):
            return
        earlier = None if stored.request.command is None else stored.request.command.model
        if earlier is None or (earlier.argv, earlier.arguments) != (model.argv, model.arguments):
            raise TrainingError(f"{self.paths.directory} holds the run of another command: choose another folder")

    def _write_control_files(
        self, spec: CommandSpec, command: RenderedCommand, device: DeviceInfo, rank_devices: Sequence[str]
    ) -> tuple[Path, Launch]:
        """Write what the injected code reads into a folder of its own, which ends with the job; return what starts."""
        folder = self._stack.enter_context(TemporaryFolder())
        (folder / "events").mkdir()
        cards = cards_of_host(device)
        own_cards = cards_of_ranks(device, spec.parallelism.world_size, rank_devices)
        passes, samples = self._figures.accumulation_steps, dict[str, int]()
        for probe in self._recommendation.evidence.probes:
            counted, is_of_size = probe.counted, probe.micro_batch_size == self._figures.micro_batch_size
            if counted is not None and counted.of_plan and is_of_size:
                at = (whole_updates(counted.ranks[0], self._figures.accumulation_steps) or [-1])[-1]
                passes = counted.ranks[0].backward_passes[at]
                samples = {name: counts[at] for name, counts in counted.ranks[0].samples.items()}
        settings = {
            "ends": False,
            "device": device.kind,
            "limit_bytes": None,
            "memory_margin": 0.0,
            "backward_passes": passes,
            "samples_per_rank": self._figures.accumulation_steps * self._figures.micro_batch_size,
            "samples_by_source": samples,
            "oom_texts": oom_texts(),
            "used_bytes": [cards[card].used_bytes for card in own_cards or cards],
            "least_context_bytes": device.least_context_bytes,
        }
        inherited = job_environment(self._recommendation.environment, os.environ) | propagated_environment()
        environment = injected_environment({**inherited, **command.environment}, device.kind, folder, own_cards)
        if temporary := environment.get("TMPDIR"):
            environment["TMPDIR"] = str(self._stack.enter_context(room_for_sockets(Path(temporary))))
        launch: Launch = {
            "argv": list(command.argv),
            "working_directory": str(command.working_directory.absolute()),
            "environment": environment,
            "fixes_addresses": False,
            "log": str(self.paths.log),
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        return folder, launch

    def new_output(self) -> bytes:
        """Output of the command since the last call, in order; at most a megabyte."""
        try:
            with self.paths.log.open("rb") as stream:
                stream.seek(self._shown_bytes)
                block = stream.read(_BLOCK_BYTES)
        except FileNotFoundError:
            return b""
        self._shown_bytes += len(block)
        return block

    @property
    def progress(self) -> CommandProgress:
        """The updates that were made until the last call of ``poll``."""
        return self._reports.progress

    @property
    def is_above_limit(self) -> bool:
        """True once the peak of a rank has passed the limit of the recommendation."""
        headroom, peak = self._recommendation.headroom, self.progress.peak_bytes
        return headroom is not None and peak is not None and peak > headroom.limit_bytes

    def poll(self) -> TrainingResult | None:
        """Return the result once the command and all processes of its tree have ended, else None.

        Raises:
            StorageError: once, when the disk is too full for the file of the result.
        """
        if self._result is None and self._command is not None:
            self._reports.read()
            if self._command.wait(0):
                self._reports.read()
                self._result = self._read_result(self._command)
                write_atomically(self.paths.result, self._result.model_dump_json(indent=2))
        return self._result

    def request_stop(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the command, so that it may end by itself. Does not wait."""
        self._stopped_by = self._stopped_by or number
        if self._command is not None and not self._command.wait(0) and self._command.pid is not None:
            kill_group(self._command.pid, number)

    def kill(self) -> None:
        """End every process of the command, and wait for that. Idempotent."""
        if self._command is None:
            return
        self._is_killed = self._is_killed or not self._command.wait(0)
        self._command.end()

    def _read_result(self, command: FreshCommand) -> TrainingResult:
        if command.was_abandoned:
            # The subreaper was killed: the kernel has ended the command, but not its children.
            deadline = time.monotonic() + _ENDING_SECONDS
            while (left := processes_of(self._folder)) and time.monotonic() < deadline:
                for process in left:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(_ORPHANS_SECONDS)
        # Of this start, and not of an earlier one in the folder.
        length = min(_OUTPUT_BYTES, _size(self.paths.log) - self._log_start)
        return result_of_job(
            EndedJob(
                figures=self._figures,
                recommendation=self._recommendation,
                reports=self._reports,
                exit_status=command.status,
                start_error=command.error,
                stopped_by=self._stopped_by,
                is_killed=self._is_killed,
                kernel_oom_kills=kernel_oom_kills() - self._kills_before,
                output=tail(self.paths.log, length) if length > 0 else "",
                seconds=time.monotonic() - self._began,
            )
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def figures_of_plan(plan: Plan, updates: int) -> Figures:
    """The figures of a plan, which repeats one size."""
    return Figures(plan.micro_batch_size, plan.gradient_accumulation_steps, plan.world_size, updates)
