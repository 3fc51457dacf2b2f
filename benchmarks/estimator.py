"""How far estimates of peak memory are from what probes measure, on the workloads of finders.py.

python benchmarks/estimator.py [--device cpu] [--sizes 4 16 64] [--output benchmarks/results/estimator.json]

On the CPU: the curve that leads a search (two traces on fake tensors) against the peak of a fresh process, without any
limit; the rise between the smallest and the largest size is compared too, since that is what the search goes by. On a
card: the estimate for a card of this name against `max_memory_allocated`, `max_memory_reserved`, and the latter with
what NVML says the context took. On either: estimates for a card that others have measured (estimator_published.py),
and how long the command line takes to estimate GPT-2 124M. An error is the estimate's, relative to the measurement:
above zero it is too high. The file is written after every workload and every published row, the seconds last.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import estimator_published
from finders_workloads import Case, cases
from reporting import HERE, let_probes_import, measured_here, new_parser, print_head, print_row, write_result

from batchwright.errors import EstimateError, WorkloadError
from batchwright.hardware.inventory import find_device
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.estimates import EstimateRequest
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult

RUNS = 5
GPT2 = {
    "model": {"kind": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}},
    "batch": {"sequence_length": 1024},
    "precision": "bf16-mixed",
}
Figures = dict[str, int]
"""Bytes by what they are called."""
Row = dict[str, Any]


class Bench:
    """Measured and estimated peaks on one device."""

    def __init__(self, device: DeviceInfo, runner: ProbeSupervisor) -> None:
        self.device = device
        self._runner = runner

    def _tuning(self, case: Case) -> TuningSession:
        return TuningSession(
            case.request, self.device, environment=self._runner.environment(), versions=installed_versions()
        )

    def measured(self, case: Case, size: int) -> Figures | None:
        """What a fresh process without a limit took; none where the device is too small.

        Raises:
            WorkloadError: when it fails for another reason than memory.
        """
        first = self._tuning(case).next_probe()
        assert first is not None
        result = self._runner.run(first.model_copy(update={"micro_batch_size": size, "limit_bytes": None}))
        if result.outcome is Outcome.OOM:
            return None
        if result.outcome is not Outcome.FIT:
            raise WorkloadError(f"{case.name} at micro-batch {size}: {result.outcome}: {result.message}")
        return self._figures(result)

    def _figures(self, result: ProbeResult) -> Figures:
        if self.device.kind == "cpu":
            return {"process": result.process_peak_bytes or 0}
        return {
            "allocated": result.peak_allocated_bytes or 0,
            "reserved": result.peak_reserved_bytes or 0,
            "device": result.held_bytes or 0,
        }

    def estimated(self, case: Case, sizes: list[int]) -> tuple[dict[int, Figures], float]:
        """What an estimate says of each size, and the seconds it took."""
        return self._expected(case, sizes) if self.device.kind == "cpu" else self._for_card(case, sizes)

    def _expected(self, case: Case, sizes: list[int]) -> tuple[dict[int, Figures], float]:
        question = self._tuning(case).expectation_request()
        assert question is not None
        try:
            expected = self._runner.expect(question)
        except EstimateError:
            return {}, 0.0
        return {size: {"process": round(expected.used_bytes(size))} for size in sizes}, expected.seconds

    def _for_card(self, case: Case, sizes: list[int]) -> tuple[dict[int, Figures], float]:
        from batchwright.estimation.client import estimate  # noqa: PLC0415 - a card's alone

        found: dict[int, Figures] = {}
        seconds = 0.0
        for size in sizes:
            request = EstimateRequest(
                spec=case.request.spec,
                gpus=(self.device.name,),
                micro_batch_size=size,
                effective_batch_size=case.request.effective_batch_size,
            )
            answer = estimate(request)
            peak = answer.gpus[0].peak
            assert peak is not None
            found[size] = {
                "allocated": peak.allocated_bytes,
                "reserved": peak.reserved_bytes,
                "device": peak.reserved_bytes + peak.outside_allocator_bytes.expected,
            }
            seconds = answer.seconds
        return found, seconds


def rows(bench: Bench, sizes: list[int]) -> Iterator[Row]:
    """A workload at a time."""
    for case in cases(bench.device):
        estimated, seconds = bench.estimated(case, sizes)
        measured = {size: figures for size in sizes if (figures := bench.measured(case, size)) is not None}
        row = {"name": case.name, "seconds": round(seconds, 2), "measured": measured, "estimated": estimated}
        row["errors"] = {
            str(size): {name: round(estimated[size][name] / it - 1, 4) for name, it in figures.items()}
            for size, figures in measured.items()
            if size in estimated
        }
        row["rise"] = rise_errors(measured, estimated)
        show(row)
        yield row


def rise_errors(measured: Mapping[int, Figures], estimated: Mapping[int, Figures]) -> dict[str, float]:
    """The error of what the largest size takes above the smallest."""
    both = sorted(set(measured) & set(estimated))
    if len(both) < 2:
        return {}
    low, high = both[0], both[-1]
    return {
        name: round(
            (estimated[high][name] - estimated[low][name]) / (measured[high][name] - measured[low][name]) - 1, 4
        )
        for name in measured[low]
    }


def show(row: Row) -> None:
    """Print a workload's lines of a markdown table."""
    if not row["estimated"]:
        print_row(row["name"], "no estimate", "", "", "", "")
    for size, errors in row["errors"].items():
        for name, error in errors.items():
            took, said = row["measured"][int(size)][name] / 1024**2, row["estimated"][int(size)][name] / 1024**2
            print_row(row["name"], size, name, f"{took:.1f}", f"{said:.1f}", f"{error:+.1%}")
    for name, error in row["rise"].items():
        print_row(row["name"], "rise", name, "", "", f"{error:+.1%}")


def summary(found: list[Row]) -> dict[str, float]:
    """Median and largest size of the errors, by figure."""
    errors: dict[str, list[float]] = {}
    for row in found:
        for by_name in row["errors"].values():
            for name, error in by_name.items():
                errors.setdefault(name, []).append(abs(error))
        for name, error in row.get("rise", {}).items():
            errors.setdefault(f"rise of {name}", []).append(abs(error))
    medians = {f"{name}, median": round(median(column), 4) for name, column in errors.items()}
    return {**medians, **{f"{name}, largest": max(column) for name, column in errors.items()}}


def command_seconds(cards: tuple[str, ...]) -> list[float]:
    """How long ``batchwright estimate`` takes, from its start to its end, each time anew."""
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "gpt2.json"
        spec.write_text(json.dumps(GPT2), encoding="utf-8")
        command = [sys.executable, "-m", "batchwright", "estimate", str(spec), "--effective-batch-size", "512", *cards]
        for _ in range(RUNS):
            began = time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
            taken.append(round(time.monotonic() - began, 2))
    print(f"\nGPT-2 124M, {' '.join(cards)}: {', '.join(f'{it:.1f}' for it in taken)} s")
    return taken


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", help="cpu or cuda:N; the first GPU, else the CPU, when left out")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64], help="micro-batches")
    parser.add_argument("--output", type=Path, help="benchmarks/results/estimator.json; estimator_cuda.json on a card")
    options = parser.parse_args()
    let_probes_import()
    device = find_device(options.device)
    output = options.output or HERE / "results" / ("estimator.json" if device.kind == "cpu" else "estimator_cuda.json")
    document = measured_here(device=device.name)
    for part in parts(device, options.sizes):
        document |= part
        write_result(output, document)
    print("\non this device:\n" + "\n".join(f"{name}: {figure:.1%}" for name, figure in document["summary"].items()))
    estimator_published.show(document["published"]["measurements"])


def parts(device: DeviceInfo, sizes: list[int]) -> Iterator[Row]:
    """Measure one thing after the other, so that one that fails leaves what was found before it.

    The load of the host is told too: it changes seconds, not bytes.
    """
    print_head("workload", "micro-batch", "figure", "measured, MiB", "estimated, MiB", "error")
    with ProbeSupervisor(device) as runner:
        found: list[Row] = []
        for row in rows(Bench(device, runner), sizes):
            found.append(row)
            yield {"summary": summary(found), "workloads": found}
    measurements: list[Row] = []
    for row in estimator_published.rows():
        measurements.append(row)
        yield {
            "published": {
                "sources": estimator_published.SOURCES,
                "summary": estimator_published.summary(measurements),
                "measurements": measurements,
            }
        }
    seconds: Row = {}
    for cards in (("--gpu", "H100-80GB"), ("--all-gpus",)):
        load = round(os.getloadavg()[0], 1)
        try:
            seconds[" ".join(cards)] = {"load_before": load, "seconds": command_seconds(cards)}
        except subprocess.CalledProcessError as error:
            seconds[" ".join(cards)] = {"load_before": load, "failed": str(error)}
        yield {"command_seconds": seconds}


if __name__ == "__main__":
    main()
