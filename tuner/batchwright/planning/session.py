"""A tuning from its request to its recommendation. Pure: a tuning can be rebuilt from the recorded probes.

A driver (``batchwright.foreground``, ``batchwright_service.worker.runner``, a test) runs the probes, in the order that
``driver`` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Literal

from batchwright.errors import DeviceError, FieldProblem, SearchError, SpecError, TuningFailedError
from batchwright.planning.accumulation import plan_size, probe_window, share_per_rank, steps_of
from batchwright.planning.comparison.gain import baseline_to_probe, baseline_to_time
from batchwright.planning.comparison.what_if import WhatIfResult, WhatIfs
from batchwright.planning.fingerprint import fingerprint, relevant_versions, request_fingerprint
from batchwright.planning.objectives import next_to_time, recommended_size
from batchwright.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from batchwright.planning.proofs.counted_plans import judge_over_sizes
from batchwright.planning.proofs.coupled_loss import WholeBatch, coupling_request, is_undivided
from batchwright.planning.proofs.plan_proof import (
    PlanProof,
    format_window,
    longer_as_plan,
    peak_without_gradients,
    prove_plan,
    whole_share_proof,
)
from batchwright.planning.recommendation import FinishedTuning, recommend
from batchwright.planning.search import Failure, MicroBatchSearch
from batchwright.planning.search_space import check_plan, memory_limit, rank_devices, search_space
from batchwright.planning.warm_start import PossibleWarmStart, TuningConditions, confirmed_proof, warm_start_from
from batchwright.schemas.recommendation import CouplingCheck, Proof, Recommendation
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import PLAN_NOT_FOLLOWED, DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from batchwright.schemas.workload import WorkloadSpec


class Tuning:
    """A tuning: it names the next probe and builds the recommendation.

    Args:
        request: the request of the tuning.
        device: the device to probe.
        environment: the environment variables of the runner's probes (``ProbeRunner.environment`` of ``driver``).
        versions: as from ``batchwright.planning.fingerprint.installed_versions``.
        parameters: the tuned constants.
        accumulates: whether an update may have several micro-batches. Otherwise the effective batch is the largest
            micro-batch that fits, and the request's is only a bound of it.
        peers: further devices of the same kind, on which the other ranks of the workload may run. On the CPU all ranks
            run as long as its memory has the limit of each.

    Raises:
        PlanError: when a rank would have no sample, or every plan would list too many micro-batches.
        SpecError: when the limit is above the device's memory.
        SpecError: when the spec cannot be probed on this kind of device.
    """

    def __init__(  # noqa: PLR0913 - what a tuning depends on
        self,
        request: TuningRequest,
        device: DeviceInfo,
        *,
        environment: dict[str, str],
        versions: dict[str, str],
        parameters: SearchParameters = DEFAULT_PARAMETERS,
        accumulates: bool = True,
        peers: Sequence[str] = (),
    ) -> None:
        if request.command is None and request.workload.compile and device.kind == "cpu":
            message = "is not supported on the CPU, where the memory budget would count the compiler too"
            raise SpecError([FieldProblem("compile", message, "True")])
        self.request = request
        self.device = device
        self.environment = environment
        self.versions = relevant_versions(request.spec, device, versions)
        self.memory_limit_bytes = memory_limit(request, device, parameters)
        self.probe_limit_bytes = int(self.memory_limit_bytes * (1.0 - request.memory_margin))
        self.rank_devices = rank_devices(request, device, self.memory_limit_bytes, peers)
        self._share = share_per_rank(request.effective_batch_size, request.spec.parallelism.world_size)[0]
        self._space = search_space(request, self._share, self.probe_limit_bytes, elastic=device.kind == "cpu")
        check_plan(request, self._space)
        self._parameters = parameters
        self._accumulates = accumulates
        self._search = MicroBatchSearch(self._space, parameters, of_command=request.command is not None)
        self._probes: list[ProbeResult] = []
        self.expected: ExpectedPeaks | None = None
        self.expected_context_bytes = device.expected_context_bytes or 0
        """Bytes of a process's context that estimates leave out of the limit."""
        self._missing_estimate: str | None = None
        """Reason why the search began without an estimate; None where it did not."""
        self._probes_before_estimate = 0
        self.coupling: CouplingCheck | None = None
        self._whole_batch: WholeBatch | None = None
        self._stopped_at: int | None = None
        """The largest size whose plan was proven when the tuning was stopped; none where it was not."""
        """The only exact plan, where the loss couples the samples of a batch."""
        self._warm_start: PossibleWarmStart | None = None
        self._what_ifs: WhatIfs | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything the recommendation depends on."""
        ranks = len(self.rank_devices)
        return fingerprint(self.request, self.device, self.memory_limit_bytes, self.environment, self.versions, ranks)

    @property
    def request_fingerprint(self) -> str:
        """SHA-256 of the request and the kind of device, without the versions and the exact limit."""
        return request_fingerprint(self.request, self.device, self.environment, len(self.rank_devices))

    @property
    def probes(self) -> tuple[ProbeResult, ...]:
        """The results recorded so far, in order."""
        return tuple(self._probes)

    def coupling_request(self) -> CouplingRequest | None:
        """The check for coupled samples before the first probe; none where an update is never divided."""
        if not self._accumulates or self.request.command is not None:
            return None
        return coupling_request(self.request, self.device, self._share, self.memory_limit_bytes)

    def record_coupling(self, check: CouplingCheck) -> None:
        """Record the outcome of the check for coupled samples.

        A loss that couples samples is exact only with the whole batch in one micro-batch on one rank. Unless the
        request allows other plans, only that size is probed.

        Raises:
            TuningFailedError: when no probe could find such a plan.
        """
        self.coupling = check
        if is_undivided(self.request, check):
            self._whole_batch = WholeBatch(self.request, self._share, check)
            self._whole_batch.require(self._space.size(self._space.count))

    def expectation_request(self) -> ExpectationRequest | None:
        """The request for an estimate that seeds the search; none where the first probe is known without one."""
        if self._space.count == 1 or self._warm_start is not None or self._whole_batch is not None:
            return None
        return None if self.request.command is not None else self._expectation(self.request.workload)

    def _expectation(self, spec: WorkloadSpec) -> ExpectationRequest:
        return ExpectationRequest(
            spec=spec,
            samples_per_window=self._share if self._accumulates else 1,
            largest_micro_batch=self._space.bound,
            limit_bytes=self._expected_limit_bytes(),
            context_bytes=self.expected_context_bytes,
            compute_capability=self.device.capability,
        )

    def _expected_limit_bytes(self) -> int:
        """The limit of a probe, or less where a whole card has no more: the margin is a share of what is free then."""
        context = self.expected_context_bytes
        allocatable = self.device.allocatable_bytes or self.device.total_bytes
        free = int((allocatable - context) * (1.0 - self.request.memory_margin))
        return min(self.probe_limit_bytes, max(1, context + free))

    def start_from_estimate(self, peaks: ExpectedPeaks | None) -> None:
        """Seed the search, or the rest of it, with an estimate: it changes the order of probes but never the result."""
        self.expected = peaks
        self._probes_before_estimate = len(self._probes)
        self._search = MicroBatchSearch(replace(self._space, expected=peaks), self._parameters)
        for probe in self._searched:
            self._search.tell(probe)

    def record_missing_estimate(self, reason: str) -> None:
        """Record why the search begins without an estimate."""
        self._missing_estimate = reason

    def _late_estimate(self) -> str | None:
        """Describe an estimate that was missing when the search began; None where none was."""
        if self._missing_estimate is None:
            return None
        if self.expected is None:
            return f"The search began without an estimate, and ended without one: {self._missing_estimate}."
        probes = self._probes_before_estimate
        return (
            f"The search began without an estimate: {self._missing_estimate}. It went on with the estimate after "
            f"{probes} probe{'' if probes == 1 else 's'}."
        )

    @property
    def lacks_estimate(self) -> bool:
        """True while an estimate that the search began without could still lead it."""
        return self._missing_estimate is not None and self.expected is None and self._search.verdict is None

    def possible_warm_start(self, stored: Recommendation) -> PossibleWarmStart:
        """The warm start that a stored recommendation for the same request would give this tuning.

        Raises:
            SpecError: when the recommendation is for another request, or has no full proof of its own.
        """
        return warm_start_from(stored, self._conditions, self._parameters)

    def warm_start_from(self, stored: Recommendation) -> None:
        """Start from a stored recommendation for the same request, which a single probe may confirm.

        Raises:
            SpecError: as ``possible_warm_start``.
            SearchError: when results were recorded already.
        """
        if self._probes:
            raise SearchError(f"{len(self._probes)} probes were recorded before the warm start: warm-start first")
        start = self.possible_warm_start(stored)
        if start.is_useful:
            self.start_from_estimate(start.peaks)
            self._warm_start = start

    @property
    def _conditions(self) -> TuningConditions:
        return TuningConditions(
            request=self.request,
            device=self.device,
            environment=self.environment,
            versions=self.versions,
            memory_limit_bytes=self.memory_limit_bytes,
            probe_limit_bytes=self.probe_limit_bytes,
            space=self._space,
            ranks=len(self.rank_devices),
        )

    def next_probe(self) -> ProbeRequest | None:
        """The next probe to run, or none when the tuning is over.

        First come the sizes of the search, then the baseline's, then the plans to time, and last the recommended plan,
        unless a fit was at least as demanding (``batchwright.planning.proofs.plan_proof``). A command that does not
        train as planned, or that replaces files of the user, ends the tuning.
        """
        is_over = self._misled is not None or self._stopped_at is not None or self._overwriting is not None
        return None if is_over else self._following_probe()

    def _following_probe(self) -> ProbeRequest | None:
        if self._whole_batch is not None:
            over = self._whole_batch.failed(self._probes) or self._search.verdict is not None
            return None if over else self._request(self._share)
        size = None if self._confirmed() else self._size_to_confirm() or self._search.ask() or self._whole_share()
        size = self._baseline_to_probe() if size is None else size
        if size is not None:
            return self._request(size, counts_plan=self._may_prove_plan(size))
        plan = self._plan_to_time()
        return self._plan_to_run() if plan is None else self._request(plan, measures_time=True)

    def _request(
        self,
        size: int,
        *,
        share: int | None = None,
        measures_time: bool = False,
        runs_plan: bool = False,
        counts_plan: bool = False,
    ) -> ProbeRequest:
        return ProbeRequest(
            spec=self.request.spec,
            micro_batch_size=size,
            samples_per_window=(share or self._share) if self._accumulates else size,
            device=self.device.id,
            limit_bytes=self.probe_limit_bytes,
            memory_margin=self.request.memory_margin,
            timeout_seconds=self.request.probe_timeout_seconds,
            measures_time=measures_time,
            runs_plan=runs_plan,
            counts_plan=counts_plan,
            rank_devices=self.rank_devices,
        )

    def record(self, result: ProbeResult) -> None:
        """Record the result of a probe.

        Raises:
            SearchError: when this tuning cannot have requested the probe.
        """
        size = result.micro_batch_size
        if result.measures_time:
            if self.request.objective != "fastest" or size != plan_size(self._share, steps_of(self._share, size)):
                raise SearchError(
                    f"no plan with micro-batches of {size} is timed: the objective is {self.request.objective!r}, "
                    f"and a rank has {self._share} samples"
                )
        elif result.runs_plan:
            expected = self._plan_to_run()
            if expected is None or probe_window(expected) != result.micro_batch_sizes:
                window = format_window(result.micro_batch_sizes)
                raise SearchError(f"the plan in micro-batches of {window} is not the one to run now")
        elif self._baseline_to_probe() == size:
            pass  # after the search, which it must not change
        elif self._search.verdict is None:
            self._search.tell(result)
        elif size != self._whole_share():
            raise SearchError(f"the search has ended: no probe of {size} was requested")
        self._probes.append(result)
        if self._overwriting is not None and self._following_probe() is not None:
            self.stop("error")

    def stop(self, stopped_by: Literal["interrupted", "error"] = "interrupted") -> bool:
        """End the tuning before its end; return whether the probes so far prove a plan, which it then recommends."""
        self._search.stopped_by = stopped_by
        proof = self._proof()
        if not isinstance(proof, Proof) or self._misled is not None or self._whole_batch is not None:
            self._search.stopped_by = None
            return False
        fits = {probe.micro_batch_size for probe in self._probes if probe.outcome is Outcome.FIT}
        for size in sorted((size for size in fits if size <= proof.fits), reverse=True):
            if not prove_plan(self._planned_request(proof), size, self._probes, self._parameters).needs_run:
                self._stopped_at = size
                return True
        self._search.stopped_by = None
        return False

    @property
    def _misled(self) -> ProbeResult | None:
        """The probe of a command that did not train by its figures; none where all did."""
        for probe in self._probes:
            judged = judge_over_sizes(probe, self._probes, self._share) if probe.outcome is Outcome.FIT else None
            if judged is not None and judged.as_planned is False:
                return probe.model_copy(update={"message": judged.statement})
            if probe.error_type == PLAN_NOT_FOLLOWED:
                return probe
        return None

    @property
    def _overwriting(self) -> ProbeResult | None:
        """The probe of a command that replaced files of the user, who has not allowed that; none where none did."""
        command = self.request.command
        if command is None or command.model.allow_overwriting:
            return None
        return next((probe for probe in self._probes if probe.files is not None and probe.files.replaced), None)

    def _size_to_confirm(self) -> int | None:
        """The size of the stored recommendation, until a probe has shown whether it still fits."""
        if self._warm_start is None or self._search.verdict is not None:
            return None
        return self._warm_start.size if all(probe.outcome is Outcome.LOST for probe in self._probes) else None

    def _confirmed(self) -> Proof | None:
        """The proof that rests on a stored proof which a probe has confirmed."""
        if self._warm_start is None or self._search.verdict is not None:
            return None
        return confirmed_proof(self._warm_start, self._probes, self._conditions, self._parameters)

    def _plan_to_time(self) -> int | None:
        """The largest micro-batch of the plan to time next, once the search has ended."""
        proof = self._proof()
        if self.request.objective != "fastest" or not isinstance(proof, Proof) or proof.fits == 0:
            return None
        plan = next_to_time(
            self._share, proof.fits, self._probes, self._parameters, repeats=self.request.command is not None
        )
        return baseline_to_time(self.request, self._share, proof, self._probes) if plan is None else plan

    def _baseline_to_probe(self) -> int | None:
        """The size of the request's baseline, once the search has ended; none where plans are timed."""
        proof = self._proof()
        if self.request.objective == "fastest" or not self._accumulates or not isinstance(proof, Proof):
            return None
        return baseline_to_probe(self.request, self._share, proof, self._probes)

    def _plan_to_run(self) -> ProbeRequest | None:
        """The probe of the plan to recommend, where no fit was at least as demanding."""
        proof = self._proof()
        plan = self._plan_proof(proof) if isinstance(proof, Proof) else None
        if plan is None or not plan.needs_run:
            return None
        is_counted = self.request.command is not None
        return self._request(plan.window[0], share=plan.share, runs_plan=True, counts_plan=is_counted)

    def _may_prove_plan(self, size: int) -> bool:
        """Return whether a probe of the search runs the plan with its size, which then needs no run of its own.

        It does for a command, where the size is likely the plan's (that of a stored recommendation, or the last of the
        search) and the probe takes only a few times longer.
        """
        divides = self._accumulates and self._share % size == 0
        if self.request.command is None or self.request.objective == "fastest" or not divides:
            return False
        if size == self._size_to_confirm():
            return True
        fits = [probe for probe in self._searched if probe.outcome is Outcome.FIT]
        if not fits or not self._search.may_end_with(size):
            return False
        return longer_as_plan(fits, size, self._share) <= self._parameters.longest_as_plan

    def _plan_proof(self, proof: Proof) -> PlanProof | None:
        """The plan to recommend, and what the probes show of it; none where nothing fits."""
        if not proof.fits:
            return None
        objective = self.request.objective
        size = recommended_size(objective, self._share, proof.fits, self._probes, self._parameters)
        size = size if self._stopped_at is None else self._stopped_at
        return prove_plan(self._planned_request(proof), size, self._probes, self._parameters)

    @property
    def _searched(self) -> list[ProbeResult]:
        """The probes of the search, without runs of plans, which must not change its conclusions."""
        return [probe for probe in self._probes if not probe.runs_plan]

    def _whole_share(self) -> int | None:
        """The rank's whole share, when it is worth one more probe after the search has ended below it.

        An update of a single micro-batch holds no gradients while it runs, so the share may fit although smaller
        micro-batches, of which there are several in an update, do not. The share is probed if its expected peak, by the
        line through the two largest fits less the gradients, is within the limit.
        """
        proof = self._search.verdict
        if not isinstance(proof, Proof) or proof.stopped_by != "oom" or proof.fits == 0:
            return None
        if not self._accumulates or self._space.bound != self._share or self._whole_share_probe is not None:
            return None
        if self._share % min(self.request.granularity, self._share):
            return None
        expected = peak_without_gradients(self._searched, self._share, self._parameters)
        return self._share if expected is not None and expected <= self.probe_limit_bytes else None

    @property
    def _whole_share_probe(self) -> ProbeResult | None:
        return next((probe for probe in self._searched if probe.micro_batch_size == self._share), None)

    def _proof(self) -> Proof | Failure | None:
        """The verdict of the search, or the confirmed stored proof, or the proof of the whole share if that fitted."""
        verdict, whole = self._search.verdict or self._confirmed(), self._whole_share_probe
        fits_whole = whole is not None and whole.outcome is Outcome.FIT
        if isinstance(verdict, Proof) and verdict.fits < self._share and fits_whole:
            return whole_share_proof(self._share, verdict)
        return verdict

    def _planned_request(self, proof: Proof) -> TuningRequest:
        """The request, with the largest micro-batch as its effective batch where updates do not accumulate."""
        if self._accumulates or not proof.fits:
            return self.request
        return self.request.model_copy(update={"effective_batch_size": proof.fits})

    def next_what_if(self) -> ExpectationRequest | None:
        """The next request for an estimate of a what-if; none before the end of the search and after the last one."""
        what_ifs = self._requested_what_ifs()
        spec = None if what_ifs is None else what_ifs.ask()
        return None if spec is None else self._expectation(spec)

    def record_what_if(self, peaks: ExpectedPeaks | None) -> None:
        """Record the estimate for ``next_what_if``; none where the changed spec cannot be estimated."""
        what_ifs = self._requested_what_ifs()
        if what_ifs is not None:
            what_ifs.tell(peaks)

    def _requested_what_ifs(self) -> WhatIfs | None:
        proof = self._proof()
        if not self.request.what_if or not isinstance(proof, Proof) or self.next_probe() is not None:
            return None
        if self._what_ifs is None:
            self._what_ifs = WhatIfs(
                self.request.workload,
                self.device,
                space=self._space,
                effective_batch_size=self.request.effective_batch_size,
                proof=proof,
                probes=self._searched,
                expected=None if self._warm_start else self.expected,  # measured peaks are not an estimate
            )
        return self._what_ifs

    def proof_of_search(self) -> Proof:
        """Return the proof of the largest size, for which the plan need not have run.

        Raises:
            TuningFailedError: when the search has not ended, or ended without a proof (a workload's error, a hang).
            DeviceError: when the probe's process could not use the device.
        """
        verdict = self._proof()
        if verdict is None:
            raise self._unfinished()
        if isinstance(verdict, Failure):
            if self._probes[-1].is_device_error:
                raise DeviceError(self._probes[-1].message)
            error = TuningFailedError(verdict.reason, verdict.message)
            if self._probes[-1].traceback:
                error.add_note(self._probes[-1].traceback)
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
        if self._misled is not None:
            raise TuningFailedError(
                PLAN_NOT_FOLLOWED,
                "The command does not train by its figures, in the probe of micro-batch "
                f"{self._misled.micro_batch_size}: {self._misled.message}. A plan for it would not give the effective "
                "batch: check the arguments that set its batch size and accumulation, and what its framework "
                "multiplies them by. Where a sample is something else, say so (`--samples-dimension`, "
                "`--samples-per-unit`, `--no-count-samples`)",
            )
        if self._overwriting is not None and self._stopped_at is None and self._following_probe() is not None:
            raise TuningFailedError("overwrites-files", _remedy_of_overwriting(self._overwriting))
        if self._whole_batch is not None:
            self._whole_batch.require_fit(self._probes)
        proof = self.proof_of_search()
        if self.next_probe() is not None:
            raise self._unfinished()
        return recommend(
            FinishedTuning(
                request=self._planned_request(proof),
                device=self.device,
                proof=proof,
                plan_proof=self._plan_proof(proof),
                probes=self.probes,
                memory_limit_bytes=self.memory_limit_bytes,
                probe_limit_bytes=self.probe_limit_bytes,
                fingerprint=self.fingerprint,
                environment=self.environment,
                versions=self.versions,
                notes=self._search.warnings,
                expected=self.expected,
                late_estimate=self._late_estimate(),
                warm_start=self._warm_start.evidence if self._warm_start else None,
                what_if=self._what_ifs.result() if self._what_ifs else WhatIfResult(),
                coupling=self.coupling,
                accumulates=self._accumulates,
                parameters=self._parameters,
            ),
            identifier=identifier,
            created_at=created_at,
            total_seconds=total_seconds,
        )


def _remedy_of_overwriting(probe: ProbeResult) -> str:
    done = probe.files.in_words if probe.files is not None else ""
    return (
        f"The probe of micro-batch {probe.micro_batch_size} wrote over files that existed before: it {done}. Every "
        "probe may do so, and a program that resumes from such a file goes on from the probe before. Have the command "
        "write to `{output_dir}`, a folder of each probe's own; or give probes alone an argument (`--probe-argument`) "
        "or a variable (`--probe-env NAME=VALUE`) with which it writes nothing, or elsewhere; or go on all the same "
        "with `--allow-overwriting`"
    )
