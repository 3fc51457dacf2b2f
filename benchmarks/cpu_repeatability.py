"""How well the CPU's answer repeats: the same tuning, ten times each for three models, every probe a fresh process.

python benchmarks/cpu_repeatability.py [--runs 10] [--output benchmarks/results/cpu_repeatability.json]
"""

import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from reporting import measured_here, new_parser, print_head, print_row, write_result

from batchwright.hardware.inventory import cpu
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import parse_spec

MIB = 1024**2


def requests() -> dict[str, TuningRequest]:
    """Three models of different character, each with room for tens to thousands of samples."""
    mlp = {"name": "mlp", "input_features": 784, "hidden_features": 512, "hidden_layers": 3}
    gpt = {"name": "gpt", "layers": 3, "heads": 4, "width": 128}
    resnet = {"name": "resnet", "width": 8, "blocks_per_stage": 1, "classes": 10}
    specs = {
        "mlp": (parse_spec({"model": {"kind": "reference", "architecture": mlp}}), 20_000, 200 * MIB),
        "gpt": (
            parse_spec({"model": {"kind": "reference", "architecture": gpt}, "batch": {"sequence_length": 64}}),
            10_000,
            200 * MIB,
        ),
        "resnet": (
            parse_spec({"model": {"kind": "reference", "architecture": resnet}, "batch": {"image_size": 48}}),
            4_000,
            300 * MIB,
        ),
    }
    return {
        name: TuningRequest(spec=spec, effective_batch_size=batch, device="cpu", memory_limit_bytes=limit)
        for name, (spec, batch, limit) in specs.items()
    }


def tune_once(runner: ProbeSupervisor, request: TuningRequest) -> Recommendation:
    """One tuning, from scratch."""
    began = time.monotonic()
    tuning = TuningSession(request, cpu(), environment=runner.environment(), versions=installed_versions())
    while (probe := tuning.next_probe()) is not None:
        tuning.record(runner.run(probe))
    return tuning.recommendation(
        identifier="benchmark", created_at=datetime.now(UTC), total_seconds=time.monotonic() - began
    )


def summary(found: list[Recommendation]) -> dict[str, Any]:
    """Answers, probes, OOMs and seconds per phase over the runs of one model."""
    fits = [probe for one in found for probe in one.evidence.probes]
    phases = ("start", "build", "warmup", "measure", "total")
    return {
        "answers": [one.largest_micro_batch_size for one in found],
        "probes": [one.timings.probes for one in found],
        "out_of_memory_probes": [one.timings.out_of_memory_probes for one in found],
        "tuning_seconds": [round(one.timings.total_seconds, 2) for one in found],
        "median_probe_seconds": {
            phase: round(statistics.median(getattr(probe.seconds, phase) for probe in fits), 3) for phase in phases
        },
    }


def main() -> None:
    """Run, print a table, write the figures."""
    parser = new_parser(__doc__, "cpu_repeatability.json")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    with ProbeSupervisor(cpu()) as runner:
        began = time.monotonic()
        runner.start(next(iter(requests().values())).workload)
        start = time.monotonic() - began
        models = {
            name: summary([tune_once(runner, it) for _ in range(options.runs)]) for name, it in requests().items()
        }
    phases = "median probe, s: start + build + warm-up + measure = total"
    print_head("model", "answers (runs)", "probes", "OOMs", phases)
    for name, figures in models.items():
        answers = ", ".join(f"{size} ({count})" for size, count in sorted(Counter(figures["answers"]).items()))
        seconds = figures["median_probe_seconds"]
        split = " + ".join(str(seconds[phase]) for phase in ("start", "build", "warmup", "measure"))
        probes, ooms = (statistics.median(figures[key]) for key in ("probes", "out_of_memory_probes"))
        print_row(name, answers, f"{probes:g}", f"{ooms:g}", f"{split} = {seconds['total']}")
    figures = {"fork_server_start_seconds": round(start, 2), "models": models}
    write_result(options.output, measured_here() | figures)


if __name__ == "__main__":
    main()
