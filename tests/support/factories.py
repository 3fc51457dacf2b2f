"""Documents that tests start from: small, valid, and explicit about what each test varies."""

from datetime import UTC, datetime
from typing import Any

from batchwright.planning.accumulation import balanced_plan
from batchwright.schemas.plans import Plan
from batchwright.schemas.recommendation import Evidence, Headroom, Proof, Recommendation, Timings
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.residuals import EstimateResidual, PeakResidual
from batchwright.schemas.results import DeviceInfo, Outcome, Phase, ProbeResult
from batchwright.schemas.workload import WorkloadSpec, parse_spec

CPU = DeviceInfo(id="cpu", kind="cpu", name="test processor", total_bytes=16 * 1024**3)
CUDA = DeviceInfo(id="cuda:0", kind="cuda", name="test card", total_bytes=16 * 1024**3, driver_version="1.0")


def mlp_spec(**changes: Any) -> WorkloadSpec:
    """A small MLP with synthetic data."""
    return parse_spec(
        {
            "model": {
                "kind": "reference",
                "architecture": {"name": "mlp", "input_features": 32, "hidden_features": 32, "classes": 4},
            },
            "data": {"kind": "synthetic", "samples": 50},
            **changes,
        }
    )


def gpt_spec(**changes: Any) -> WorkloadSpec:
    """A small GPT over bytes."""
    architecture = {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": 256}
    return parse_spec(
        {
            "model": {"kind": "reference", "architecture": architecture},
            "batch": {"sequence_length": 16},
            "data": {"kind": "synthetic", "samples": 50},
            **changes,
        }
    )


def resnet_spec(**changes: Any) -> WorkloadSpec:
    """A small ResNet with BatchNorm."""
    architecture = {"name": "resnet", "width": 8, "blocks_per_stage": 1, "classes": 10}
    model = {"kind": "reference", "architecture": architecture}
    return parse_spec({"model": model, "batch": {"image_size": 32}, **changes})


def python_spec(target: str, **arguments: Any) -> WorkloadSpec:
    """A workload from user code."""
    return parse_spec({"model": {"kind": "python", "target": target, "arguments": arguments}})


def transformers_spec(task: str, config: dict[str, Any], **changes: Any) -> WorkloadSpec:
    """A transformers architecture."""
    return parse_spec({"model": {"kind": "transformers", "task": task, "config": config}, **changes})


def tuning_request(spec: WorkloadSpec | None = None, effective_batch_size: int = 100, **changes: Any) -> TuningRequest:
    """A request on the CPU."""
    return TuningRequest(
        spec=spec or mlp_spec(), effective_batch_size=effective_batch_size, **{"device": "cpu", **changes}
    )


def probe_result(
    size: int, outcome: Outcome = Outcome.FIT, used_bytes: int | None = 1000, **changes: Any
) -> ProbeResult:
    """A probe of a size on the CPU."""
    return ProbeResult(
        micro_batch_size=size,
        **{
            "accumulates": True,
            "micro_batch_sizes": (size, size) if changes.get("accumulates", True) else (size,),
            "outcome": outcome,
            "phase": Phase.DONE if outcome is Outcome.FIT else Phase.WARMUP,
            "failed_micro_batch": 1 if outcome in {Outcome.OOM, Outcome.INVALID_SIZE} else None,
            "message": f"{outcome} at {size}",
            "process_peak_bytes": used_bytes,
            **changes,
        },
    )


def residual(**changes: Any) -> EstimateResidual:
    """A residual of an estimate that was right: 8 samples fitted, and 9 did not."""
    return EstimateResidual(
        **{
            "hardware": "card",
            "family": "gpt",
            "versions": {"torch": "2.8"},
            "limit_bytes": 8500,
            "zero_expected_bytes": 0,
            "fit": PeakResidual(micro_batch_size=8, expected_bytes=8000, measured_bytes=8000),
            "failed_size": 9,
            "failed_expected_bytes": 9000,
            **changes,
        }
    )


def recommendation(
    spec: WorkloadSpec | None = None,
    effective_batch_size: int = 10,
    largest_micro_batch_size: int = 4,
    limit_bytes: int = 4 * 1024**3,
    world_size: int | None = None,
    **changes: Any,
) -> Recommendation:
    """A feasible recommendation on the CPU, without having probed."""
    spec = spec or mlp_spec()
    ranks = world_size or spec.parallelism.world_size
    request = tuning_request(spec.with_world_size(ranks), effective_batch_size)
    return Recommendation(
        **{
            "plan": balanced_plan(effective_batch_size, ranks, largest_micro_batch_size),
            "largest_micro_batch_size": largest_micro_batch_size,
            "id": "rec_test",
            "created_at": datetime(2026, 1, 1, tzinfo=UTC),
            "feasible": True,
            "evidence": Evidence(
                probes=(probe_result(largest_micro_batch_size),),
                proof=Proof(fits=largest_micro_batch_size, stopped_by="bound", statement="for a test"),
            ),
            "headroom": Headroom(limit_bytes=limit_bytes, peak_bytes=0, free_bytes=0, free_fraction=0.0),
            "device": CPU,
            "fingerprint": "0" * 64,
            "environment": {},
            "versions": {},
            "timings": Timings(total_seconds=0.0, probe_seconds=0.0, probes=1, out_of_memory_probes=0),
            "request": request,
            **changes,
        }
    )


def inconclusive(**changes: Any) -> Recommendation:
    """The recommendation of a quick tuning: 4 fits, and larger sizes were not tried."""
    proof = Proof(fits=4, stopped_by="quick", statement="for a test")
    return recommendation(**{"evidence": Evidence(probes=(probe_result(4),), proof=proof), **changes})


def plan_of(found: Recommendation | None) -> Plan:
    """The plan of a recommendation that has one."""
    assert found is not None
    assert found.plan is not None
    return found.plan
