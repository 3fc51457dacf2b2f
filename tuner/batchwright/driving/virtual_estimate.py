"""Estimate by probes on virtual cards: the engine `virtual` of ``batchwright estimate``. No torch itself.

For each GPU a session describes its virtual card (``batchwright.virtual_gpu``). The search of a tuning runs there, with
the supervisor of any probe: torch's own CUDA build, its allocator and its choice of kernels are real, and no kernel
runs. The limit is that of a trace: the expected memory of the card, less the margin and the memory outside the
allocator.

Nothing found here is measured on a GPU. What the libraries below torch take is not known on a virtual card: workspaces
of cuDNN are zero, and the context and NCCL's buffers are the figures of the table of GPUs.
"""

import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import override

from batchwright.device_traits import CUDA_ALLOCATOR_VARIABLES
from batchwright.driving.loop import TuningHooks, drive
from batchwright.errors import FieldProblem, SpecError, TuningFailedError, VirtualGpuError
from batchwright.estimation.verdict import outside_bytes, plan_to_list, shortfall_bytes, unknown_estimate, usable_bytes
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.planning.accumulation import share_per_rank
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.planning.stages.stage_order import ALL_STAGES, SEARCH_STAGES
from batchwright.planning.steps import RunProbe, Step
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.estimates import Estimate, EstimateRequest, GpuEstimate, PeakEstimate, Verdict
from batchwright.schemas.gpus import ByteInterval, Gpu
from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import LARGEST_EFFECTIVE_BATCH_SIZE, ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, ModelSummary, Outcome, ProbeResult
from batchwright.system.fork_server.spawn import ChildProcess
from batchwright.virtual_gpu.build import build
from batchwright.virtual_gpu.description import KNOWN_MODELS, VirtualGpu, VirtualHost
from batchwright.virtual_gpu.session import VirtualGpuSession

Report = Callable[[str], None]
"""Shows what is done now, in a few words."""

_DEVICE = "cuda:0"
_ROOMY_CARD_BYTES = 1024**4
"""Memory of the card on which a size runs that does not fit: more than any card has. Expandable segments reserve
addresses for 9/8 of a card's memory, of which a process of a session has 4 TiB."""
_ESTIMATE_WAIT_SECONDS = 180.0
"""Longer than a tuning on a card waits for the trace that leads its search: a probe on a virtual card is no faster."""
_ALLOCATOR_SETTINGS = {"default": "", "expandable-segments": "expandable_segments:True"}
_NOTE = (
    "Run on a virtual card, not measured: torch and its allocator ran, but no kernel did, and cuDNN's "
    "workspaces count as zero. A tuning on the card proves what fits."
)
_NOT_READ = DataReading(read=0, seconds=0.0, reason="an estimate reads no data")
_NOT_COMPARED = CouplingCheck(
    verdict="not-compared", message="A virtual card computes no loss, so the loss was not checked for coupled samples."
)


def estimate_on_virtual_cards(request: EstimateRequest, report: Report = lambda _: None) -> Estimate:
    """Estimate the memory of the workload on each GPU by running its updates on virtual cards, one GPU at a time.

    Args:
        request: the workload and the GPUs. ``timeout_seconds`` is the limit of each probe.
        report: called when another step begins.

    Raises:
        VirtualGpuError: when torch's CUDA build or a compiler is missing, or the figures of a card are not known.
        EstimateError: when a GPU is not known.
        PlanError: when the effective batch leaves a rank without samples, or its plan would be too long.
        SpecError: when another loop is requested, or a field of the spec is invalid in a way that only building the
            model shows.
        TuningFailedError: when the workload fails on the cards of all GPUs.
        ProbeError: when the probing machinery failed.
    """
    began = time.monotonic()
    if request.loop != "batchwright":
        message = "can only be traced, but the engine `virtual` runs Batchwright's loop: leave one of the two out"
        raise SpecError([FieldProblem("loop", message, request.loop)])
    gpus = [find_gpu(name) for name in request.gpus]
    _require_figures(gpus)
    report("preparing virtual cards, which compiles their libraries once")
    _require_cuda_build()
    found: list[GpuEstimate] = []
    failures: list[TuningFailedError] = []
    models: list[ModelSummary] = []
    for gpu in gpus:
        try:
            estimated, probes = _estimate(request, gpu, report)
        except TuningFailedError as error:  # the workload may run on other cards
            failures.append(error)
            found.append(unknown_estimate(request, gpu, error, "run on a virtual card"))
            continue
        found.append(estimated)
        models += [probe.model for probe in probes if probe.model is not None]
    if len(failures) == len(gpus):
        raise failures[0]
    return Estimate(
        engine="virtual",
        decisions="cuda",
        parameters=max((model.parameters for model in models), default=0),
        gpus=tuple(found),
        versions=installed_versions(),
        seconds=time.monotonic() - began,
        notes=tuple(dict.fromkeys((_NOTE, *(note for model in models for note in model.config_notes)))),
    )


def _require_figures(gpus: Sequence[Gpu]) -> None:
    """Refuse cards of which the virtual ones cannot be described, before any work.

    Raises:
        VirtualGpuError: naming them, the known ones and the remedy.
    """
    unknown = [gpu.name for gpu in gpus if gpu.name not in KNOWN_MODELS]
    if unknown:
        raise VirtualGpuError(
            f"there are no virtual cards of {', '.join(unknown)}, only of {', '.join(KNOWN_MODELS)}: name one "
            "of these, or leave the engine out: the default, `trace`, knows every card"
        )


def _require_cuda_build() -> None:
    """Compile the libraries of virtual cards, unless they are compiled.

    Raises:
        VirtualGpuError: when something is missing, with what installs it.
    """
    try:
        build(Path(sysconfig.get_path("purelib")))
    except VirtualGpuError as error:
        raise VirtualGpuError(f"{error}. The default engine, `trace`, needs none of this") from None


def _estimate(request: EstimateRequest, gpu: Gpu, report: Report) -> tuple[GpuEstimate, tuple[ProbeResult, ...]]:
    """Return the estimate for one GPU, and the probes that it took.

    Raises:
        BatchwrightError: as ``estimate_on_virtual_cards``.
    """
    outside = outside_bytes(request, gpu).expected  # all memory outside the allocator counts as the context
    card = VirtualGpu.of(gpu.name).model_copy(update={"context_bytes": outside})
    settings = _ALLOCATOR_SETTINGS[request.allocator]
    with virtual_supervisor(card, settings) as runner:
        report(f"tracing updates for the {gpu.name}, to find where to begin")
        tuning = _search(request, card, runner, report)
        largest, statement = _largest_size(request, tuning)
        size = request.micro_batch_size or max(1, largest)
        probes = list(tuning.probes)
        shown = (each for each in probes if each.outcome in {Outcome.FIT, Outcome.OOM} and not each.runs_plan)
        ran = next((each for each in shown if each.micro_batch_size == size and not each.brackets), None)
        if ran is None:
            ran = _run(runner, _probe_request(request, size, tuning.conditions.probe_limit_bytes), report)
            probes.append(ran)
    peak = _peak(request, gpu, ran, Verdict.FITS) if ran.outcome is Outcome.FIT else None
    if ran.outcome is Outcome.OOM:
        roomy = card.model_copy(update={"total_bytes": _ROOMY_CARD_BYTES, "nvml_total_bytes": _ROOMY_CARD_BYTES})
        with virtual_supervisor(roomy, settings) as runner:
            probes.append(_run(runner, _probe_request(request, size, None), report))
        peak = _peak(request, gpu, probes[-1], Verdict.DOES_NOT_FIT)
    if peak is None:
        raise TuningFailedError(ran.outcome.lower(), f"the probe of {size} ended with {ran.outcome}: {ran.message}")
    plan, plan_note = plan_to_list(request, largest)
    estimated = GpuEstimate(
        gpu=gpu.name,
        usable_bytes=usable_bytes(gpu, request),
        feasible=Verdict.FITS if largest else Verdict.DOES_NOT_FIT,
        largest_micro_batch_size=largest,
        probes=len(probes),
        peak=peak,
        plan=plan,
        notes=(*gpu.notes, *statement, *plan_note),
    )
    return estimated, tuple(probes)


# --- the card ---


@contextmanager
def virtual_supervisor(card: VirtualGpu, allocator_settings: str = "") -> Iterator[ProbeSupervisor]:
    """Yield a supervisor of probes on a host of its own with this card alone, as `cuda:0`.

    Args:
        card: the card.
        allocator_settings: the value of `PYTORCH_ALLOC_CONF`, whatever this process has.
    """
    with VirtualGpuSession(VirtualHost(gpus=(card,))) as session:
        settings = dict.fromkeys(CUDA_ALLOCATOR_VARIABLES, allocator_settings)
        variables = {**session.environment(), **settings, "CUDA_VISIBLE_DEVICES": "0"}

        def start(module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> ChildProcess:
            return ChildProcess(module, arguments, {**environment, **variables})

        with ProbeSupervisor(device_of(card), start, estimate_wait_seconds=_ESTIMATE_WAIT_SECONDS) as runner:
            yield runner


def device_of(card: VirtualGpu) -> DeviceInfo:
    """Return the device as a search sees it: its memory is what torch finds, not NVML's total."""
    major, minor = card.compute_capability
    return DeviceInfo(
        id=_DEVICE,
        kind="cuda",
        name=card.name,
        total_bytes=card.total_bytes,
        compute_capability=f"{major}.{minor}",
        expected_context_bytes=card.context_bytes,
    )


# --- the search ---


def _search(request: EstimateRequest, card: VirtualGpu, runner: ProbeSupervisor, report: Report) -> TuningSession:
    """Run the search of a tuning, and the plan where one is requested."""
    tuning = TuningSession(
        TuningRequest(
            spec=request.spec,
            effective_batch_size=_effective_batch_size(request),
            device=_DEVICE,
            memory_margin=request.memory_margin,
            probe_timeout_seconds=request.timeout_seconds,
            allow_batch_coupling=True,
        ),
        device_of(card),
        environment=runner.environment(),
        versions=installed_versions(),
        stages=SEARCH_STAGES if request.effective_batch_size is None else ALL_STAGES,
    )
    tuning.record(_NOT_READ)
    tuning.record(_NOT_COMPARED)
    drive(tuning, runner, _Reporting(card.name, report))
    return tuning


class _Reporting(TuningHooks):
    """Report each probe of a search on a virtual card."""

    def __init__(self, card: str, report: Report) -> None:
        self._card = card
        self._report = report

    @override
    def begins(self, step: Step) -> None:
        if isinstance(step, RunProbe):
            self._report(_activity(step.request, self._card))


def _effective_batch_size(request: EstimateRequest) -> int:
    """Return the requested effective batch, else one that never decides which size is the largest."""
    return request.effective_batch_size or LARGEST_EFFECTIVE_BATCH_SIZE


def _largest_size(request: EstimateRequest, tuning: TuningSession) -> tuple[int, tuple[str, ...]]:
    """Return the largest size that ran, of which the plan ran too where one is requested, and the proofs."""
    proof = tuning.proof_of_search()
    if request.effective_batch_size is None:
        return proof.fits, (proof.statement,)
    found = tuning.recommendation(identifier="virtual", created_at=datetime.now(UTC), total_seconds=0.0)
    statements = (proof.statement, found.evidence.plan_proof)
    return found.largest_micro_batch_size or 0, tuple(filter(None, statements))


def _probe_request(request: EstimateRequest, size: int, limit_bytes: int | None) -> ProbeRequest:
    return ProbeRequest(
        spec=request.spec,
        micro_batch_size=size,
        samples_per_window=share_per_rank(_effective_batch_size(request), request.spec.parallelism.world_size)[0],
        device=_DEVICE,
        limit_bytes=limit_bytes,
        memory_margin=request.memory_margin,
        timeout_seconds=request.timeout_seconds,
    )


def _run(runner: ProbeSupervisor, probe: ProbeRequest, report: Report) -> ProbeResult:
    report(_activity(probe, runner.device.name))
    return runner.run(probe)


def _activity(probe: ProbeRequest, card: str) -> str:
    activity = "the plan" if probe.runs_plan else "updates"
    return f"running {activity} at micro-batch {probe.micro_batch_size:,} on a virtual {card}"


def _peak(request: EstimateRequest, gpu: Gpu, probe: ProbeResult, verdict: Verdict) -> PeakEstimate | None:
    """Return the memory that a probe took; None where it did not run to its end."""
    allocated, reserved = probe.peak_allocated_bytes, probe.peak_reserved_bytes
    if probe.outcome is not Outcome.FIT or allocated is None or reserved is None:
        return None
    outside = outside_bytes(request, gpu)
    return PeakEstimate(
        micro_batch_size=probe.micro_batch_size,
        accumulates=probe.accumulates,
        verdict=verdict,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        capacity_bytes=reserved,
        outside_allocator_bytes=outside,
        device_bytes=ByteInterval(
            low=reserved + outside.low,
            expected=reserved + outside.expected,
            high=reserved + outside.high + shortfall_bytes(gpu, request),
        ),
        thrashes=bool(probe.allocator_retries),
    )
