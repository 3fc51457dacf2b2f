"""Bounds of a tuning: the memory it may take, the sizes worth probing, and when to probe the whole share.

A plan lists every micro-batch of an update, ``tuner.planning.accumulation.MOST_MICRO_BATCHES`` at most: a request
whose largest size worth probing would take more is refused before any probe. Where a search ends at a size that would,
the tuning ends with the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.errors import DeviceError, FieldProblem, SpecError
from tuner.planning.accumulation import check_listable
from tuner.planning.objectives import sizes_for_steps
from tuner.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from tuner.planning.search_space import SearchSpace
from tuner.schemas.recommendation import Proof
from tuner.schemas.requests import TuningRequest
from tuner.schemas.results import DeviceInfo, Outcome, ProbeResult
from tuner.units import format_bytes


def memory_limit(request: TuningRequest, device: DeviceInfo, parameters: SearchParameters = DEFAULT_PARAMETERS) -> int:
    """The memory a run may take, before the margin: as requested, else the whole card, or half of the host.

    Raises:
        SpecError: when the request is for more than the device has.
        DeviceError: when the context of a process alone takes the limit that is left by the margin.
    """
    if request.memory_limit_bytes is None:
        return int(device.total_bytes * parameters.cpu_memory_share) if device.kind == "cpu" else device.total_bytes
    if request.memory_limit_bytes > device.total_bytes:
        message = (
            f"is above the {format_bytes(device.total_bytes)} ({device.total_bytes} bytes) of {device.id} "
            f"({device.name}): lower the limit, or leave it out to use the whole device"
        )
        given = f"{format_bytes(request.memory_limit_bytes)}, {request.memory_limit_bytes} bytes"
        raise SpecError([FieldProblem("memory_limit_bytes", message, given)], "request")
    _check_room_for_context(request.memory_limit_bytes, request.memory_margin, device)
    return request.memory_limit_bytes


def _check_room_for_context(limit_bytes: int, margin: float, device: DeviceInfo) -> None:
    """Refuse a limit that no context fits into; a larger context is noticed by the first probe.

    Raises:
        DeviceError: with the limit, the context's bytes and the remedy.
    """
    context = device.least_context_bytes
    if context is None or int(limit_bytes * (1.0 - margin)) > context:
        return
    raise DeviceError(
        f"the memory limit of {format_bytes(limit_bytes)} ({limit_bytes} bytes), less the margin of {margin:.0%}, "
        f"leaves no memory for tensors: the context of a process on {device.id} ({device.name}) takes at least "
        f"{format_bytes(context)} ({context} bytes). Raise the limit, or leave it out to use the whole device"
    )


def search_space(request: TuningRequest, share: int, limit_bytes: int, *, elastic: bool = False) -> SearchSpace:
    """The sizes worth probing: no plan can use a micro-batch above a rank's share.

    For every objective but the largest size, those at which the number of accumulation steps changes: plans depend on
    nothing else. ``elastic`` is that of ``SearchSpace``.
    """
    bound, reason = share, f"the {share} samples of a rank in one update"
    if request.max_micro_batch_size is not None and request.max_micro_batch_size < share:
        bound, reason = (
            request.max_micro_batch_size,
            f"the requested maximum of {request.max_micro_batch_size}",
        )
    if request.objective == "largest":
        return SearchSpace(bound, reason, request.granularity, limit_bytes, elastic=elastic)
    sizes = sizes_for_steps(share, bound, request.granularity)
    highest = max(1, bound // request.granularity) * request.granularity
    if sizes[-1] < highest:
        reason = f"{highest} would take as many accumulation steps; {reason}"
    if request.granularity > 1:
        reason = f"of the multiples of {request.granularity}: {reason}"
    return SearchSpace(sizes[-1], reason, sizes=sizes, limit_bytes=limit_bytes, elastic=elastic)


def check_plan(request: TuningRequest, space: SearchSpace) -> None:
    """Refuse a request whose plan would be too long even with the largest size worth probing.

    Raises:
        PlanError: with the numbers, the limit, and numbers that are possible.
    """
    check_listable(request.effective_batch_size, request.spec.parallelism.world_size, space.size(space.count))


def peak_without_gradients(
    probes: Sequence[ProbeResult], size: int, parameters: SearchParameters = DEFAULT_PARAMETERS
) -> float | None:
    """Extrapolate the peak in bytes at ``size`` in an update of one micro-batch; none without enough measurements.

    The peak is on the line through the two largest fits of accumulating updates, less the gradients. Where there is one
    such fit, the line begins at what is resident with the gradients. Fits whose peak the limit may have cut off are
    left out, because the line through them is too flat.
    """
    measured = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.used_bytes and probe.accumulates]
    fits = {probe.micro_batch_size: probe for probe in measured}
    if not fits:
        return None
    complete = {at: fit for at, fit in fits.items() if not _may_be_cut_off(fit, parameters)}
    informative = complete or {max(fits): fits[max(fits)]}
    high = informative[max(informative)]
    if high.model is None:
        return None
    gradients = high.model.parameter_bytes * high.model.trainable_parameters / max(1, high.model.parameters)
    points: list[tuple[int, float]] = [(at, informative[at].used_bytes or 0) for at in sorted(informative)[-2:]]
    if len(points) == 1:
        if high.resident_bytes is None:
            return None
        points.insert(0, (0, high.resident_bytes + gradients))
    (low_size, low_used), (high_size, high_used) = points
    return high_used + (high_used - low_used) / (high_size - low_size) * (size - high_size) - gradients


def _may_be_cut_off(fit: ProbeResult, parameters: SearchParameters) -> bool:
    """Return whether the limit may have cut off the requests of a process's libraries."""
    if fit.process_peak_bytes is None or fit.limit_bytes is None:
        return False
    return fit.process_peak_bytes > parameters.saturated_share * fit.limit_bytes


def whole_share_proof(share: int, below: Proof) -> Proof:
    """Build the proof of the whole share from its own fit, although the search closed below it."""
    statement = (
        f"{share}, the whole share of a rank, fits: an update of one micro-batch holds no gradients while it runs. "
        f"With several micro-batches in an update the largest is {below.fits}: {below.statement}"
    )
    return Proof(fits=share, stopped_by="bound", statement=statement)
