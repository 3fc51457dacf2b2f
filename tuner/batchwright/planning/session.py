"""A tuning from its request to its recommendation. Pure: a tuning can be rebuilt from the recorded probes.

``batchwright.driving.loop`` runs the steps that it names. Which probes these are is decided by the stages
(``batchwright.planning.stages``), the first of which that asks for a probe gets one.
"""

from collections.abc import Sequence
from datetime import datetime

from batchwright.errors import DeviceError, SearchError, TuningFailedError
from batchwright.planning.comparison.what_if import WhatIfResult, WhatIfs
from batchwright.planning.finished_tuning import FinishedTuning
from batchwright.planning.proofs.coupled_loss import coupling_request, is_undivided
from batchwright.planning.recommendation import recommend
from batchwright.planning.search import Failure
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.stage_order import ALL_STAGES, QUICK_STAGES, Stages
from batchwright.planning.stages.undivided_batch import UndividedBatch
from batchwright.planning.steps import (
    CheckCoupling,
    EstimateWhatIf,
    ProcessStarted,
    ReadData,
    RunProbe,
    SearchEstimate,
    SeedSearch,
    StartProcess,
    Step,
    StepOutcome,
    TimedStep,
    WhatIfEstimate,
)
from batchwright.planning.tuning_conditions import conditions_of
from batchwright.planning.warm_start import warm_start_from
from batchwright.schemas.recommendation import CouplingCheck, DataReading, Proof, Recommendation, StopReason
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import PLAN_NOT_FOLLOWED, DeviceInfo, ExpectedPeaks, ProbeResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.units import counted


class TuningSession:
    """A tuning: it names the next step and builds the recommendation.

    Args:
        request: the request of the tuning.
        device: the device to probe.
        environment: the environment variables of the runner's probes (``ProbeRunner.environment``).
        versions, accumulates, peers: as for ``batchwright.planning.tuning_conditions.conditions_of``.
        stages: the stages of its course; by default those of the request.

    Attributes:
        conditions: what follows from the request and the device alone.
        expected: the estimate that leads the search.
        expected_context_bytes: bytes of a process's context that estimates leave out of the limit.
        data: the reading of the data before the first probe; None if no file is named.
        coupling: the outcome of the check for coupled samples.
        step_seconds: the time of each step that is no probe, by its name in ``Timings``.

    Raises:
        PlanError, SpecError, DeviceError: as ``batchwright.planning.tuning_conditions.conditions_of``.
    """

    def __init__(  # noqa: PLR0913 - what a tuning depends on
        self,
        request: TuningRequest,
        device: DeviceInfo,
        *,
        environment: dict[str, str],
        versions: dict[str, str],
        accumulates: bool = True,
        peers: Sequence[str] = (),
        stages: Stages | None = None,
    ) -> None:
        self.conditions = conditions_of(
            request, device, environment=environment, versions=versions, accumulates=accumulates, peers=peers
        )
        self.expected: ExpectedPeaks | None = None
        self.expected_context_bytes = device.expected_context_bytes or 0
        self.data: DataReading | None = None
        self.coupling: CouplingCheck | None = None
        self.step_seconds: dict[str, float] = {}
        self._course = Course(self.conditions)
        self._stages = stages or (QUICK_STAGES if request.quick else ALL_STAGES)
        self._undivided: UndividedBatch | None = None
        """The only stage, where the loss couples the samples of a batch."""
        self._is_started = request.command is not None  # whose probes are processes of its own
        self._is_seeded = False
        self._missing_estimate: str | None = None
        """Reason why the search began without an estimate; None where it did not."""
        self._probes_before_estimate = 0
        self._what_ifs: WhatIfs | None = None

    @property
    def request(self) -> TuningRequest:
        """The request of the tuning."""
        return self.conditions.request

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything the recommendation depends on."""
        return self.conditions.fingerprint

    @property
    def request_fingerprint(self) -> str:
        """SHA-256 of the request and the kind of device, without the versions and the exact limit."""
        return self.conditions.request_fingerprint

    @property
    def probes(self) -> tuple[ProbeResult, ...]:
        """The results recorded so far, in order."""
        return tuple(self._course.probes)

    # --- the steps ---

    def next_step(self) -> Step | None:
        """The next step; None when the tuning is over.

        The data is read and the coupling checked again after a restart. The check of the request and the estimate come
        before the first probe, and are not repeated, except that a quick tuning has its estimate made again.
        """
        if not self._is_started:
            return StartProcess(self.request.workload)
        if self.data is None and (spec := self._spec_with_data()) is not None:
            return ReadData(spec)
        if (coupling := self.coupling_request()) is not None:
            return CheckCoupling(coupling)
        if not self._is_seeded and self.begins_search:
            return SeedSearch(self.request, self.expectation_request())
        if (probe := self.next_probe()) is not None:
            return RunProbe(probe)
        changed = self._next_what_if()
        return None if changed is None else EstimateWhatIf(self._expectation(changed))

    def record(self, outcome: StepOutcome) -> None:
        """Record the outcome of a step.

        Raises:
            SearchError: when this tuning cannot have requested the probe.
            TuningFailedError: when the loss couples samples, and no probe could find an exact plan.
        """
        match outcome:
            case ProcessStarted():
                self._is_started = True
            case DataReading():
                self.data = outcome
            case CouplingCheck():
                self._record_coupling(outcome)
            case SearchEstimate():
                self._is_seeded = True
                self._missing_estimate = self._missing_estimate or outcome.missing
                if outcome.peaks is not None:
                    self.start_from_estimate(outcome.peaks)
            case ProbeResult():
                self._record_probe(outcome)
            case WhatIfEstimate() if self._what_ifs is not None:
                self._what_ifs.tell(outcome.peaks)

    def add_seconds(self, step: TimedStep, seconds: float) -> None:
        """Add the time of a step that is no probe to that of the earlier ones of its kind."""
        self.step_seconds[step.timing] = self.step_seconds.get(step.timing, 0.0) + seconds

    # --- before the first probe ---

    @property
    def begins_search(self) -> bool:
        """True if an estimate is to lead the search: before the first probe, and after a restart of a quick tuning."""
        return not self._course.probes or (self.request.quick and self._course.verdict is None)

    def _spec_with_data(self) -> WorkloadSpec | None:
        """The spec whose data is to be read from files; None if there is none, and for a command."""
        return None if self.request.command is not None else self.request.workload.with_files_of_data()

    def coupling_request(self) -> CouplingRequest | None:
        """The check for coupled samples before the first probe; None once it is recorded or if nothing is divided."""
        conditions = self.conditions
        if not conditions.accumulates or conditions.request.command is not None or self.coupling is not None:
            return None
        return coupling_request(conditions.request, conditions.device, conditions.share, conditions.memory_limit_bytes)

    def _record_coupling(self, check: CouplingCheck) -> None:
        """Record the outcome of the check for coupled samples.

        A loss that couples samples is exact only with the whole batch in one micro-batch on one rank. Unless the
        request allows other plans, only that size is probed.
        """
        self.coupling = check
        if is_undivided(self.request, check):
            self._undivided = UndividedBatch(self.conditions, check)
            self._stages = (self._undivided,)

    def expectation_request(self) -> ExpectationRequest | None:
        """The request for an estimate that seeds the search; None where the first probe is known without one."""
        is_known = self._course.warm_start is not None or self._undivided is not None
        if is_known or self.conditions.space.count == 1 or self.request.command is not None:
            return None
        return self._expectation(self.request.workload)

    def _expectation(self, spec: WorkloadSpec) -> ExpectationRequest:
        """The request for an estimate of a spec, under the limit of a probe.

        The limit is lower where a whole card has no more: the margin is a share of what is free then.
        """
        conditions, context = self.conditions, self.expected_context_bytes
        allocatable = conditions.device.allocatable_bytes or conditions.device.total_bytes
        free = int((allocatable - context) * (1.0 - conditions.request.memory_margin))
        return ExpectationRequest(
            spec=spec,
            samples_per_window=conditions.share if conditions.accumulates else 1,
            largest_micro_batch=conditions.space.bound,
            limit_bytes=min(conditions.probe_limit_bytes, max(1, context + free)),
            context_bytes=context,
            compute_capability=conditions.device.capability,
        )

    def start_from_estimate(self, peaks: ExpectedPeaks | None) -> None:
        """Seed the search, or the rest of it, with an estimate: it changes the order of probes but never the result."""
        self.expected = peaks
        self._probes_before_estimate = len(self._course.probes)
        self._course.seed(peaks)

    @property
    def lacks_estimate(self) -> bool:
        """True while an estimate that the search began without could still lead it."""
        return self._missing_estimate is not None and self.expected is None and self._course.search.verdict is None

    def warm_start_from(self, stored: Recommendation) -> None:
        """Start from a stored recommendation for the same request, which a single probe may confirm.

        Raises:
            SpecError: when the recommendation is for another request, or has no full proof of its own.
            SearchError: when results were recorded already.
        """
        if self._course.probes:
            recorded = len(self._course.probes)
            raise SearchError(f"{recorded} probes were recorded before the warm start: warm-start first")
        start = warm_start_from(stored, self.conditions)
        if start.is_useful:
            self.start_from_estimate(start.peaks)
            self._course.warm_start = start

    # --- the probes ---

    def next_probe(self) -> ProbeRequest | None:
        """The next probe to run, or None when the tuning is over.

        A command that does not train as planned, or that replaces files of the user, ends the tuning.
        """
        return None if self._course.is_over else self._following_probe()

    def _following_probe(self) -> ProbeRequest | None:
        """The probe of the first stage that asks for one."""
        return next((probe for stage in self._stages if (probe := stage.ask(self._course)) is not None), None)

    def _record_probe(self, result: ProbeResult) -> None:
        """Record the result of a probe."""
        if result.files is not None:
            earlier = (probe.files for probe in self._course.probes if probe.files is not None)
            result = result.model_copy(update={"files": result.files.after(earlier)})
        for stage in reversed(self._stages):  # the last ones know their own results
            if stage.tell(self._course, result):
                break
        self._course.probes.append(result)
        if self._course.overwriting is not None and self._following_probe() is not None:
            self.stop("error")

    def stop(self, stopped_by: StopReason = "interrupted") -> bool:
        """End the tuning before its end; return whether the probes so far prove a plan, which it then recommends."""
        return self._undivided is None and self._course.stop(stopped_by)

    # --- after the last probe ---

    def _next_what_if(self) -> WorkloadSpec | None:
        """The next changed spec to estimate, after the last probe; None after the last one."""
        proof = self._course.proof
        if not self.request.what_if or proof is None:
            return None
        if self._what_ifs is None:
            self._what_ifs = WhatIfs(
                self.request.workload,
                self.conditions.device,
                space=self.conditions.space,
                effective_batch_size=self.request.effective_batch_size,
                proof=proof,
                probes=self._course.searched,
                expected=None if self._course.warm_start else self.expected,  # measured peaks are not an estimate
            )
        return self._what_ifs.ask()

    def proof_of_search(self) -> Proof:
        """Return the proof of the largest size, for which the plan need not have run.

        Raises:
            TuningFailedError: when the search has not ended, or ended without a proof (a workload's error, a hang).
            DeviceError: when the probe's process could not use the device.
        """
        verdict = self._course.verdict
        if verdict is None:
            raise self._unfinished()
        if isinstance(verdict, Failure):
            last = self._course.probes[-1]
            if last.is_device_error:
                raise DeviceError(last.message)
            error = TuningFailedError(verdict.reason, verdict.message)
            if last.traceback and " ".join(last.traceback.split()) not in " ".join(verdict.message.split()):
                error.add_note(last.traceback)
            raise error
        return verdict

    def _unfinished(self) -> TuningFailedError:
        return TuningFailedError("unfinished", f"the tuning has not finished: {self.next_probe()} has not run yet")

    def recommendation(self, *, identifier: str, created_at: datetime, total_seconds: float) -> Recommendation:
        """Build the recommendation.

        Raises:
            TuningFailedError: when the search ended without a proof (a workload's error, a hang), or the loss couples
                samples and the whole batch does not fit.
            DeviceError: when the probe's process could not use the device.
            PlanError: when the largest fit is so small that its plan would list too many micro-batches.
        """
        course = self._course
        if course.misled is not None:
            raise TuningFailedError(PLAN_NOT_FOLLOWED, _remedy_of_misled(course.misled))
        if course.overwriting is not None and course.stopped_at is None and self._following_probe() is not None:
            raise TuningFailedError("overwrites-files", _remedy_of_overwriting(course.overwriting))
        if self._undivided is not None:
            self._undivided.require_fit(course.probes)
        proof = self.proof_of_search()
        if self.next_probe() is not None:
            raise self._unfinished()
        finished = FinishedTuning(
            conditions=self.conditions,
            request=course.planned_request(proof),
            proof=proof,
            plan_proof=course.plan_proof(proof),
            probes=self.probes,
            notes=course.search.warnings,
            expected=self.expected,
            late_estimate=self._late_estimate(),
            warm_start=course.warm_start.evidence if course.warm_start else None,
            what_if=self._what_ifs.result() if self._what_ifs else WhatIfResult(),
            coupling=self.coupling,
            data=self.data,
            step_seconds=self.step_seconds,
        )
        return recommend(finished, identifier=identifier, created_at=created_at, total_seconds=total_seconds)

    def _late_estimate(self) -> str | None:
        """Describe an estimate that was missing when the search began; None where none was."""
        if self._missing_estimate is None:
            return None
        if self.expected is None:
            return f"The search began without an estimate, and ended without one: {self._missing_estimate}."
        probes = self._probes_before_estimate
        return (
            f"The search began without an estimate: {self._missing_estimate}. The estimate was used after "
            f"{counted(probes, 'probe')}."
        )


def _remedy_of_misled(probe: ProbeResult) -> str:
    return (
        f"In the probe of micro-batch {probe.micro_batch_size}, the command did not train with the sizes it "
        f"was given: {probe.message}. A plan would not give the effective batch. Check the arguments that set "
        "its batch size and accumulation, and what its framework multiplies them by. If it counts samples "
        "differently, say so (`--samples-dimension`, `--samples-per-unit`, `--no-count-samples`)"
    )


def _remedy_of_overwriting(probe: ProbeResult) -> str:
    done = probe.files.in_words if probe.files is not None else ""
    return (
        f"The probe of micro-batch {probe.micro_batch_size} wrote over files that existed before: it {done}. "
        "Every probe may do so, and a program that resumes from such a file would continue the previous "
        "probe. Have the command write to `{output_dir}`, a separate folder for each probe; or turn "
        "writing off in probes with an argument (`--probe-argument`) or a variable (`--probe-env "
        "NAME=VALUE`); or accept it with `--allow-overwriting`"
    )
