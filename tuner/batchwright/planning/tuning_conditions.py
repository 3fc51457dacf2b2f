"""The conditions of a tuning, derived from its request and its device alone. Pure, no torch.

They are fixed before the first probe: the memory that a probe may take, the sizes worth probing, the ranks that run,
and the fingerprints by which equal requests share a recommendation.

A plan lists every micro-batch of an update, ``batchwright.planning.accumulation.MOST_MICRO_BATCHES`` at most: a request
whose largest size worth probing would take more is refused before any probe. Where a search ends at a size that would,
the tuning ends with the same error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from batchwright.errors import FieldProblem, SpecError
from batchwright.planning.accumulation import check_divisible, check_listable, divisors_up_to, share_per_rank
from batchwright.planning.fingerprint import fingerprint, relevant_versions, request_fingerprint
from batchwright.planning.objectives.by_name import objective_of
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.planning.search_space import SearchSpace, memory_limit, rank_devices
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo


@dataclass(frozen=True)
class TuningConditions:
    """The conditions of a tuning. Make one with ``conditions_of``.

    Attributes:
        request: the request of the tuning.
        device: the device it runs on.
        environment: the environment variables of its probes.
        versions: the versions that matter for the spec.
        memory_limit_bytes: the memory a run may take.
        probe_limit_bytes: the memory a probe may take: the limit without the margin.
        rank_devices: the device of each rank of a probe; empty if one rank stands for the others, or is the only one.
        share: samples in an update of the rank with the most.
        space: the sizes that are searched.
        objective: what the tuning looks for.
        accumulates: whether an update may have several micro-batches.
    """

    request: TuningRequest
    device: DeviceInfo
    environment: dict[str, str]
    versions: dict[str, str]
    memory_limit_bytes: int
    probe_limit_bytes: int
    rank_devices: tuple[str, ...]
    share: int
    space: SearchSpace
    objective: ObjectiveStrategy = field(repr=False)
    accumulates: bool = True

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything the recommendation depends on."""
        ranks = len(self.rank_devices)
        return fingerprint(self.request, self.device, self.memory_limit_bytes, self.environment, self.versions, ranks)

    @cached_property
    def request_fingerprint(self) -> str:
        """SHA-256 of the request and the kind of device, without the versions and the exact limit."""
        return request_fingerprint(self.request, self.device, self.environment, len(self.rank_devices))

    @property
    def repeats(self) -> bool:
        """Whether a plan repeats one size, which divides the share."""
        return self.request.command is not None

    def probe(  # noqa: PLR0913 - the flags of a request
        self,
        size: int,
        *,
        share: int | None = None,
        measures_time: bool = False,
        runs_plan: bool = False,
        counts_plan: bool = False,
        brackets: bool = False,
    ) -> ProbeRequest:
        """The probe of a size, as its flags say; ``share`` is that of the rank that is run, by default of the first."""
        return ProbeRequest(
            spec=self.request.spec,
            micro_batch_size=size,
            samples_per_window=(share or self.share) if self.accumulates else size,
            device=self.device.id,
            limit_bytes=self.probe_limit_bytes,
            memory_margin=self.request.memory_margin,
            timeout_seconds=self.request.probe_timeout_seconds,
            measures_time=measures_time,
            runs_plan=runs_plan,
            counts_plan=counts_plan,
            brackets=brackets,
            rank_devices=self.rank_devices,
        )


def conditions_of(  # noqa: PLR0913 - what a tuning depends on
    request: TuningRequest,
    device: DeviceInfo,
    *,
    environment: dict[str, str],
    versions: dict[str, str],
    accumulates: bool = True,
    peers: Sequence[str] = (),
) -> TuningConditions:
    """The conditions of a request on a device.

    Args:
        request: the request of the tuning.
        device: the device to probe.
        environment: the environment variables of the probes.
        versions: as from ``batchwright.planning.fingerprint.installed_versions``.
        accumulates: whether an update may have several micro-batches. Otherwise the effective batch is the largest
            micro-batch that fits, and the request's is only a bound of it.
        peers: further devices of the same kind, on which the other ranks of the workload may run. On the CPU all ranks
            run as long as its memory has the limit of each.

    Raises:
        PlanError: when a rank would have no sample, or every plan would list too many micro-batches.
        SpecError: when the limit is above the device's memory, or the spec cannot be probed on this kind of device.
        DeviceError: when the context of a process alone takes the limit.
    """
    if request.command is None and request.workload.compile and device.traits.counts_host_memory:
        message = "is not supported on the CPU, where the memory budget would count the compiler too"
        raise SpecError([FieldProblem("compile", message, "True")])
    limit = memory_limit(request, device)
    probe_limit = int(limit * (1.0 - request.memory_margin))
    ranks = request.spec.parallelism.world_size
    share = share_per_rank(request.effective_batch_size, ranks)[0]
    objective = objective_of(request)
    space = _search_space(request, objective, share, probe_limit, elastic=device.traits.counts_host_memory)
    if request.command is not None:
        check_divisible(request.effective_batch_size, ranks)
    check_listable(request.effective_batch_size, ranks, space.size(space.count))
    return TuningConditions(
        request=request,
        device=device,
        environment=environment,
        versions=relevant_versions(request.spec, device, versions),
        memory_limit_bytes=limit,
        probe_limit_bytes=probe_limit,
        rank_devices=rank_devices(request, device, limit, peers),
        share=share,
        space=space,
        objective=objective,
        accumulates=accumulates,
    )


def _search_space(
    request: TuningRequest, objective: ObjectiveStrategy, share: int, limit_bytes: int, *, elastic: bool
) -> SearchSpace:
    """The sizes worth probing: no plan can use a micro-batch above a rank's share.

    For a command the divisors of the share, since it repeats one size. For a workload the sizes of the objective.
    """
    bound, reason = share, f"the {share} samples of a rank in one update"
    if request.max_micro_batch_size is not None and request.max_micro_batch_size < share:
        bound, reason = request.max_micro_batch_size, f"the requested maximum of {request.max_micro_batch_size}"
    if request.searches_divisors:
        sizes = divisors_up_to(share, bound, request.granularity)
        if sizes[-1] < bound:
            reason = f"the largest divisor of the {share} samples of a rank; {reason}"
        return SearchSpace(sizes[-1], reason, sizes=sizes, limit_bytes=limit_bytes, elastic=elastic)
    of_objective = objective.sizes(share, bound, request.granularity)
    if of_objective is None:
        return SearchSpace(bound, reason, request.granularity, limit_bytes, elastic=elastic)
    highest = max(1, bound // request.granularity) * request.granularity
    if of_objective[-1] < highest:
        reason = f"{highest} would take the same number of accumulation steps; {reason}"
    if request.granularity > 1:
        reason = f"of the multiples of {request.granularity}: {reason}"
    return SearchSpace(of_objective[-1], reason, sizes=of_objective, limit_bytes=limit_bytes, elastic=elastic)
