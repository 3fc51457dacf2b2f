"""Build the parts of a training run, in the order that memory and random numbers require.

1. The data, before the limit: the limit is for the memory of a GPU, and the data set is in host memory.
2. The check for coupled samples, also before the limit, because it builds a model of its own. A run that resumes skips
   this step: its checkpoint may record that the check was made.
3. The memory limit, so that the model and all later parts count against it.
4. The seed, directly before the model: the data and the check may have drawn random numbers, and all ranks must build
   the same weights.
5. The model, sharded before it is moved to the device, where the full model may not fit.
6. The optimizer with its state, over the parameters on the device; then the schedule of its learning rate.
7. The seed of this rank: from here on each rank draws its own random numbers (dropout).
"""

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from batchwright.errors import TrainingError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.planning.fingerprint import canonical_json
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import TransformersModel, WorkloadSpec
from batchwright.system.data_roots import DataRoots
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.batch_schedule import BatchSchedule, Position
from batchwright.training.checkpoints import Checkpoints
from batchwright.training.data.base import TrainingData
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import end_parsers
from batchwright.training.data.seeding import epoch_order
from batchwright.training.evaluation.evaluator import Evaluator, evaluated_workload
from batchwright.training.evaluation.held_out_data import RunData, build_run_data
from batchwright.training.evaluation.library_metrics import import_metrics
from batchwright.training.evaluation.run_evaluation import RunEvaluation
from batchwright.training.fsdp import shard
from batchwright.training.launching.run_directory import RunPaths, run_identity
from batchwright.training.micro_batches.rng_state import seed_everything
from batchwright.training.optimizers import build_lr_scheduler
from batchwright.training.run_coupling import RunCoupling
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.adapters.adapter_output import base_digest
from batchwright.workloads.base import BuildsLRScheduler, Workload
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.pretrained.hub_files import cache_roots, fetch_model
from batchwright.workloads.pretrained.starting_weights import StartingWeights

_SEEDS_APART = 2**31 - 1
"""Distance of the seeds of two ranks; any number that users do not count in."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run on this rank, as ``build_run`` makes them."""

    recommendation: Recommendation
    """The spec, the plan and the memory limit."""
    request: TrainingRequest
    """Number of updates, seed and checkpoints."""
    paths: RunPaths
    """The run's files, written by rank 0."""
    device: MemoryDevice
    """This rank's device."""
    ranks: Ranks
    """The ranks that share each window."""
    data: TrainingData
    """Samples that train."""
    batch_schedule: BatchSchedule
    micro_batch_size: int
    """Samples in the largest micro-batch of the run."""
    coupling: RunCoupling
    engine: UpdateEngine
    """The model with its optimizer."""
    lr_scheduler: LRScheduler
    """The schedule of the learning rate: the spec's, or the workload's own."""
    evaluation: RunEvaluation | None
    """Evaluations on held-out samples; None where none were requested."""
    checkpoints: Checkpoints
    base_sha256: str | None
    """SHA-256 of the frozen weights, which checkpoints do not hold: those below an adapter, and of a reference policy.
    None without both."""
    notes: list[str]
    """Facts that the user should know of the run, a sentence each; appended to during the run."""

    @property
    def sharded(self) -> bool:
        """True if each rank holds a shard of the model, so that all ranks run every micro-batch together."""
        return is_sharded(self.recommendation.request.workload, self.ranks)

    @property
    def trains_adapter(self) -> bool:
        """True if what is trained is an adapter of a frozen model."""
        return self.recommendation.request.workload.adapter is not None

    @property
    def writes_base(self) -> bool:
        """True if the frozen weights below an adapter are random ones, which no folder holds."""
        model = self.recommendation.request.workload.model
        return self.trains_adapter and isinstance(model, TransformersModel) and model.pretrained is None

    @property
    def accumulates(self) -> bool:
        """True if an update has more than one micro-batch, over all ranks."""
        return _accumulates(self.batch_schedule, self.micro_batch_size, self.ranks)


def build_run(
    recommendation: Recommendation,
    request: TrainingRequest,
    paths: RunPaths,
    device: MemoryDevice,
    ranks: Ranks | None = None,
) -> RunParts:
    """Build the parts of a run, in the order of the module's docstring.

    All ranks call this with the same arguments but for the device. Without ``ranks`` there is a single rank.

    Raises:
        TrainingError: when the recommendation is not feasible, or its loss couples samples and that is not allowed.
        SpecError: when the spec has no data, or its data does not fit its model.
    """
    ranks, notes, spec = ranks or Ranks(), list[str](), recommendation.request.workload
    micro_batch_size = _largest_micro_batch(recommendation, paths.micro_batch_bound(), notes)
    workload = build_workload(spec)
    import_metrics(spec)
    is_new = ranks.gather(paths.checkpointed_update())[0] is None
    pretrained, run_data = _read(spec, workload, paths, ranks, is_new=is_new)
    data = run_data.training
    notes += data.notes
    epoch_order(request.seed, 0, len(data))  # allocated before the limit; the order of any other epoch is as large
    batch_schedule = BatchSchedule(
        request.seed, len(data), recommendation.request.effective_batch_size, ranks.rank, ranks.size, data.lengths
    )
    coupling = RunCoupling(recommendation, request, workload, device, ranks=ranks, notes=notes)
    if is_new:
        coupling.require_separate(accumulates=_accumulates(batch_schedule, micro_batch_size, ranks))
    if pretrained is not None and (is_new or _has_frozen_weights(spec)):
        workload = _starting(spec, *pretrained, ranks, notes)
    limit = recommendation.headroom.limit_bytes if recommendation.headroom else None
    if limit is not None and (device.torch_device.type == "cpu" or limit < device.total_bytes()):
        device.limit(limit)
    seed_everything(request.seed)
    model = build_model(spec, workload)
    base_sha256 = _base_digest(spec, model, ranks)
    sharded = is_sharded(spec, ranks)
    if sharded:
        shard(model, device.torch_device, ranks.size)
    model.to(device.torch_device)
    if spec.compile:
        model.compile()
    engine = UpdateEngine(spec, workload, model, device, ranks=ranks, sharded=sharded)
    engine.accumulation.largest_micro_batch = micro_batch_size
    lr_scheduler = build_lr_scheduler(spec.schedule, workload, engine.optimizer, request.updates)
    seed_rank(request.seed, ranks, update=0)
    batch, samples = batch_schedule.effective_batch_size, batch_schedule.samples
    if batch > samples:
        notes.append(
            f"the data has {samples} samples, below the effective batch of {batch}: each update uses all of them"
        )
    # All that the weights depend on: equal in all checkpoints of one run.
    identity = {**run_identity(recommendation, request), "samples": len(data)}
    if isinstance(workload, BuildsLRScheduler):
        identity["number of updates under a schedule"] = request.updates
    return RunParts(
        recommendation=recommendation,
        request=request,
        paths=paths,
        device=device,
        ranks=ranks,
        data=data,
        batch_schedule=batch_schedule,
        micro_batch_size=micro_batch_size,
        coupling=coupling,
        engine=engine,
        lr_scheduler=lr_scheduler,
        evaluation=_build_evaluation(recommendation, request, workload, run_data.held_out, engine, device, ranks),
        checkpoints=Checkpoints(paths, canonical_json(identity), request.keep_checkpoints),
        base_sha256=base_sha256,
        notes=notes,
    )


def _read(
    spec: WorkloadSpec, workload: Workload, paths: RunPaths, ranks: Ranks, *, is_new: bool
) -> tuple[tuple[Path, DataRoots] | None, RunData]:
    """Find the folder of the pretrained model, where this process needs it, and read the data."""
    folders = DataFolders.of_run(paths.cache / "datasets")
    needs_pretrained = is_new or _has_frozen_weights(spec) or spec.reads_tokenizer_of_model
    pretrained = pretrained_folder(spec, folders.roots) if needs_pretrained else None
    if pretrained is not None:
        folders = folders.with_pretrained(*pretrained)
    data = build_run_data(spec, workload, folders, ranks.size)
    end_parsers()
    return pretrained, data


def is_sharded(spec: WorkloadSpec, ranks: Ranks) -> bool:
    """Return whether each rank holds a shard of the model."""
    return spec.parallelism.strategy == "fsdp" and ranks.size > 1


def seed_rank(seed: int, ranks: Ranks, update: int) -> None:
    """Seed every rank but the first differently, after the ranks have built the same weights."""
    if ranks.rank:
        seed_everything(seed + ranks.rank * _SEEDS_APART + update)


def _accumulates(batch_schedule: BatchSchedule, micro_batch_size: int, ranks: Ranks) -> bool:
    return len(batch_schedule.window(Position(), micro_batch_size)) > 1 or ranks.size > 1


def _largest_micro_batch(recommendation: Recommendation, bound: int | None, notes: list[str]) -> int:
    """The largest micro-batch size that fits, or the smaller ``bound`` of a run in which one did not fit."""
    largest = recommendation.largest_micro_batch_size
    if not recommendation.feasible or largest is None:
        raise TrainingError(f"this recommendation is not feasible: {recommendation.infeasible_reason}")
    if bound is None or bound >= largest:
        return largest
    notes.append(
        f"a micro-batch did not fit, so micro-batches have at most {bound} samples instead of {largest}; the "
        "effective batch size is unchanged"
    )
    return bound


def pretrained_folder(spec: WorkloadSpec, roots: DataRoots, *, weights: bool = True) -> tuple[Path, DataRoots] | None:
    """The folder of the pretrained model, fetched if it is on the hub, and what may be read of it; None without one."""
    if not isinstance(spec.model, TransformersModel) or spec.model.pretrained is None:
        return None
    if spec.model.hub_model is None:
        return Path(spec.model.pretrained), roots
    folder = fetch_model(spec.model.hub_model, weights=weights)
    return folder, cache_roots(folder)


def _starting(spec: WorkloadSpec, folder: Path, roots: DataRoots, ranks: Ranks, notes: list[str]) -> Workload:
    """The workload whose model has the pretrained weights that a run starts from."""
    load, hub_model = StartingWeights(folder, notes.append, roots), getattr(spec.model, "hub_model", None)
    if not ranks.rank:
        place = f"in {folder}" if hub_model is None else f"of {hub_model}"
        notes.append(f"training starts from the weights {place} (SHA-256 {load.digest()})")
    return build_workload(spec, load)


def _has_frozen_weights(spec: WorkloadSpec) -> bool:
    """Return whether a run has weights that do not change, and that it needs again when it resumes."""
    return spec.adapter is not None or spec.preference is not None


def _base_digest(spec: WorkloadSpec, model: nn.Module, ranks: Ranks) -> str | None:
    """SHA-256 of the frozen weights, which must be equal on all ranks; None where none are kept."""
    if not _has_frozen_weights(spec):
        return None
    digest = base_digest(model)
    if len(set(ranks.gather(digest))) > 1:
        raise TrainingError("the ranks have different frozen weights: give all hosts the same pretrained model")
    return digest


def _build_evaluation(  # noqa: PLR0913, PLR0917 - a run's parts
    recommendation: Recommendation,
    request: TrainingRequest,
    workload: Workload,
    held_out: TrainingData | None,
    engine: UpdateEngine,
    device: MemoryDevice,
    ranks: Ranks,
) -> RunEvaluation | None:
    spec = recommendation.request.workload
    if spec.evaluation is None or held_out is None or recommendation.plan is None:
        return None
    evaluator = Evaluator(
        spec,
        spec.evaluation,
        evaluated_workload(spec, workload),
        held_out,
        engine=engine,
        memory=device,
        ranks=ranks,
        micro_batch_size=min(recommendation.plan.micro_batch_size, engine.accumulation.largest_micro_batch or 1),
        sharded=is_sharded(spec, ranks),
        seed=request.seed,
    )
    return RunEvaluation(spec.evaluation, evaluator, request.updates)
