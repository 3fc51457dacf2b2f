"""Probes per tuning over a sequence of tunings on one device, with and without what earlier tunings taught.

python benchmarks/learned.py [--quick] [--only oracles|cpu|virtual] [--seeds 10]
    [--output benchmarks/results/learned.json]

A sequence has 30 tunings of one family: models of several widths, depths and lengths under several limits. Each is
tuned from its estimate alone, and from the estimate corrected by the residuals of the tunings before it
(batchwright.planning.learning). On the CPU estimates and probes are real, of GPT-2 in small; a size that both ways
probe is run once. On a virtual card (only with `--only virtual`, in the environment of `make virtual-gpu-test`) probes
run torch's CUDA build: GPT-2 in small, an LSTM and a conv net, on a T4 whose context takes 256 MiB more than estimates
assume. Nothing there is measured on a GPU. On oracles, memory is a formula: the estimate misses a part that all models
of a family share, and a part of each model's own; the limit may be met below its nominal value, and measured peaks are
noisy. Every answer of an oracle is checked against the truth.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from statistics import fmean, median
from typing import Any, TypeVar

from reporting import let_probes_import, measured_here, new_parser, print_head, print_row, read_result, write_result

from batchwright.driving.loop import TuningHooks, drive
from batchwright.driving.virtual_estimate import device_of, virtual_supervisor
from batchwright.hardware.inventory import find_device
from batchwright.planning.accumulation import probe_window
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.learning.correction import conditions_of, corrected
from batchwright.planning.learning.measured_context import expect_measured_context
from batchwright.planning.learning.residual import residual_of
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.base import Document
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.residuals import EstimateResidual
from batchwright.schemas.results import DeviceInfo, ExpectedPeak, ExpectedPeaks, Outcome, Phase, ProbeResult
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.virtual_gpu.description import VirtualGpu
from tests.support.oracles import OracleRunner

GIB, MIB = 1024**3, 1024**2
LENGTH = 30
"""Tunings of a sequence."""
VIRTUAL_CARD = "T4"
VIRTUAL_SURPLUS_BYTES = 256 * MIB
"""Bytes that a context of the virtual card takes beyond the table of GPUs, as that of another driver may."""
CARD = DeviceInfo(id="cuda:0", kind="cuda", name="oracle", total_bytes=80 * GIB)
Expect = Callable[[ExpectationRequest], ExpectedPeaks | None]
Probe = Callable[[ProbeRequest], ProbeResult]
Row = dict[str, Any]
_Request = TypeVar("_Request", bound=Document)
_Answer = TypeVar("_Answer")


class Learned(TuningHooks):
    """Corrects the estimate of a tuning by residuals, as the service's worker does."""

    def __init__(self, tuning: TuningSession, residuals: Sequence[EstimateResidual]) -> None:
        self._tuning = tuning
        self._residuals = residuals

    def corrected(self, peaks: ExpectedPeaks) -> ExpectedPeaks:
        """The corrected estimate."""
        return corrected(peaks, self._residuals, conditions_of(self._tuning))


class Host:
    """A device and its runner's environment: all that a tuning needs besides its request."""

    def __init__(self, device: DeviceInfo, environment: dict[str, str]) -> None:
        self._device = device
        self._environment = environment

    def tune(
        self, request: TuningRequest, expect: Expect, probe: Probe, residuals: Sequence[EstimateResidual]
    ) -> Recommendation:
        """One tuning, as the service's worker drives it."""
        tuning = TuningSession(request, self._device, environment=self._environment, versions=installed_versions())
        expect_measured_context(tuning, residuals)
        drive(tuning, OracleRunner(probe, expect), Learned(tuning, residuals))
        return tuning.recommendation(identifier="rec", created_at=datetime.now(UTC), total_seconds=0.0)


@dataclass(frozen=True)
class Case:
    """One tuning of a sequence: its request, its estimate and its probes."""

    name: str
    request: TuningRequest
    expect: Expect
    probe: Probe
    truth: int | None = None


def sequence(host: Host, cases: Sequence[Case]) -> Iterator[Row]:
    """Tune every case both ways, in order; only the residuals of the tunings that learned are kept."""
    residuals: list[EstimateResidual] = []
    for case in cases:
        alone = host.tune(case.request, case.expect, case.probe, [])
        learned = host.tune(case.request, case.expect, case.probe, residuals)
        for found in (alone, learned):
            assert case.truth is None or found.largest_micro_batch_size == case.truth
        residual = residual_of(learned, "this device")
        residuals = [residual, *residuals] if residual is not None else residuals
        yield {
            "name": case.name,
            "limit_bytes": case.request.memory_limit_bytes,
            "largest": learned.largest_micro_batch_size,
            "without": probes_of(alone),
            "learned": probes_of(learned),
            "estimate": expected_of(learned),
        }


def probes_of(found: Recommendation) -> Row:
    """The probes of a tuning's search in order, as sizes and outcomes, and their counts."""
    searched = (probe for probe in found.evidence.probes if not probe.runs_plan)
    course = [[probe.micro_batch_size, probe.outcome.value] for probe in searched]
    return {"probes": len(course), "ooms": found.timings.out_of_memory_probes, "course": course}


def expected_of(found: Recommendation) -> Row | None:
    """The estimate at the answer over the limit, and its correction."""
    expected = found.evidence.expected
    if expected is None or found.headroom is None:
        return None
    size, limit = found.largest_micro_batch_size or 0, found.headroom.limit_bytes
    correction = expected.correction
    return {
        "share_at_answer": round(expected.used_bytes(size) / limit, 4),
        "correction": correction.model_dump() if correction else None,
    }


# --- oracles ---


@dataclass(frozen=True)
class Errors:
    """Standard deviations of an estimate's errors: of the slope, and of the bytes at size 0 as a share of 40 GiB.

    Attributes:
        shared: for all models of a family.
        own: of each model.
        fragmented: shares of the limit that cannot be used: the family's, and the deviation of each model.
        noise: standard deviation of a measured peak, as a share.
        replayed: whether replays of the estimate have the fragmentation.
    """

    shared: tuple[float, float]
    own: tuple[float, float]
    fragmented: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.0005
    replayed: bool = False


ERRORS = {
    "families 5 % off, models 0.5 %": Errors((0.05, 0.02), (0.005, 0.002)),
    "families 5 % off, models 2 %": Errors((0.05, 0.02), (0.02, 0.005)),
    "families 15 % off, models 1 %": Errors((0.15, 0.05), (0.01, 0.003)),
    "families 5 % off, models 0.5 %, 4 % fragmented": Errors((0.05, 0.02), (0.005, 0.002), (0.04, 0.005)),
    "families 1 % off, models 0.5 %, fragmentation replayed": Errors(
        (0.01, 0.005), (0.005, 0.002), (0.06, 0.02), replayed=True
    ),
    "estimates are right": Errors((0.0, 0.0), (0.002, 0.001)),
    "nothing in common, 5 % off": Errors((0.0, 0.0), (0.05, 0.02)),
}


def oracle_cases(errors: Errors, seed: int, length: int = LENGTH) -> list[Case]:
    """The tunings of a sequence on a card: limits of 16 to 80 GiB, answers of 4 to 300."""
    random = Random(seed)
    shared = [random.gauss(0.0, deviation) for deviation in errors.shared]
    return [_oracle_case(errors, shared, random, number) for number in range(length)]


def _oracle_case(errors: Errors, shared: Sequence[float], random: Random, number: int) -> Case:
    limit = random.choice((16, 24, 40, 80)) * GIB
    answer = round(math.exp(random.uniform(math.log(4), math.log(300))))
    constant = random.uniform(0.05, 0.6) * limit
    per_sample = (limit - constant) / (answer + random.uniform(0.02, 0.98))
    slope_error, zero_error = (common + random.gauss(0.0, own) for common, own in zip(shared, errors.own, strict=True))
    used = [constant + zero_error * 40 * GIB + per_sample * (1.0 + slope_error) * size for size in (1, 4096)]
    points = tuple(
        ExpectedPeak(micro_batch_size=size, used_bytes=max(1, round(peak)))
        for size, peak in zip((1, 4096), used, strict=True)
    )
    peaks = ExpectedPeaks(points=points, resident_bytes=max(0, round(0.75 * constant + zero_error * 20 * GIB)))
    usable = limit * (1.0 - max(0.0, random.gauss(*errors.fragmented)))
    largest = int((usable - constant) / per_sample)
    if errors.replayed:
        place = next(size for size in range(4096) if peaks.used_bytes(size + 1) > usable) + 0.5
        peaks = peaks.model_copy(update={"usable_bytes": max(1, round(peaks.used_bytes(place)))})
    salt = random.random()

    def probe(wanted: ProbeRequest) -> ProbeResult:
        size = wanted.micro_batch_size
        fits = size <= largest
        noise = Random(f"{salt}/{size}").gauss(0.0, errors.noise)
        return ProbeResult(
            micro_batch_size=size,
            accumulates=wanted.accumulates,
            micro_batch_sizes=probe_window(wanted),
            outcome=Outcome.FIT if fits else Outcome.OOM,
            phase=Phase.DONE if fits else Phase.WARMUP,
            peak_allocated_bytes=round((constant + per_sample * size) * (1.0 + noise)) if fits else None,
            peak_reserved_bytes=round(constant + per_sample * size) if fits else None,
            resident_bytes=round(0.75 * constant) if fits else None,
            limit_bytes=limit,
        )

    request = TuningRequest(
        spec=gpt2(64, 2, 32), effective_batch_size=4096, memory_limit_bytes=limit, memory_margin=0.0
    )
    return Case(f"{number + 1}", request, lambda _expectation: peaks, probe, largest)


# --- the CPU ---


def gpt2(width: int, layers: int, length: int) -> WorkloadSpec:
    """GPT-2 in small."""
    config = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": 1000}
    model = {"kind": "transformers", "task": "causal-lm", "config": {**config, "n_positions": length}}
    return parse_spec({"model": model, "batch": {"sequence_length": length}})


def lstm(width: int, layers: int, length: int) -> WorkloadSpec:
    """A stacked LSTM on token embeddings."""
    arguments = {"width": width, "layers": layers, "length": length}
    return parse_spec({"model": {"kind": "python", "target": "finders_workloads:lstm", "arguments": arguments}})


def resnet(width: int, blocks: int, side: int) -> WorkloadSpec:
    """A residual network with batch normalisation."""
    architecture = {"name": "resnet", "width": width, "blocks_per_stage": blocks, "classes": 100}
    model = {"kind": "reference", "architecture": architecture}
    return parse_spec({"model": model, "batch": {"image_size": side}})


@dataclass(frozen=True)
class Draws:
    """The values that the tunings of a sequence are drawn from."""

    build: Callable[[int, int, int], WorkloadSpec]
    """The workload of a width, a depth and a length."""
    seed: int
    widths: tuple[int, ...]
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    limits: tuple[int, ...]
    """Memory limits in bytes."""
    effective_batch_size: int
    device: str
    tunings: int = LENGTH


ON_THE_CPU = Draws(
    gpt2, 9, (64, 96, 128, 160), (2, 3, 4, 6), (48, 64, 96), tuple(n * MIB for n in (128, 144, 160, 192)), 2048, "cpu"
)
_LIMITS = tuple(n * GIB for n in (2, 3, 4))
ON_A_VIRTUAL_CARD = {
    "GPT-2": Draws(gpt2, 16, (192, 256, 320), (2, 3, 4), (384, 512, 640), _LIMITS, 512, "cuda:0"),
    "LSTM": Draws(lstm, 17, (256, 384, 512), (1, 2, 3), (192, 256, 320), _LIMITS, 2048, "cuda:0", 12),
    "ResNet": Draws(resnet, 18, (32, 48, 64), (1, 2, 3), (96, 128, 160), _LIMITS, 1024, "cuda:0", 12),
}
"""The sequences of each family."""


def probed_cases(runner: ProbeSupervisor, draws: Draws, most: int) -> list[Case]:
    """The tunings of a sequence that are really probed, drawn once."""
    random = Random(draws.seed)
    found = []
    for _ in range(min(most, draws.tunings)):
        width, layers = random.choice(draws.widths), random.choice(draws.layers)
        length, limit = random.choice(draws.lengths), random.choice(draws.limits)
        request = TuningRequest(
            spec=draws.build(width, layers, length),
            effective_batch_size=draws.effective_batch_size,
            device=draws.device,
            memory_limit_bytes=limit,
        )
        size = f"{limit // GIB} GiB" if limit >= GIB else f"{limit // MIB} MiB"
        name = f"width {width}, depth {layers}, length {length}, {size}"
        found.append(Case(name, request, _once(runner.expect), _once(runner.run)))
    return found


def _once(call: Callable[[_Request], _Answer]) -> Callable[[_Request], _Answer]:
    """Answer an equal request from the first call."""
    answers: dict[str, _Answer] = {}

    def answer(request: _Request) -> _Answer:
        key = request.model_dump_json()
        if key not in answers:
            answers[key] = call(request)
        return answers[key]

    return answer


# --- figures ---


def summary(rows: Sequence[Row]) -> Row:
    """The distribution of probes of the second and later tunings, and the comparison of both ways."""
    found: Row = {"tunings": len(rows)}
    for way in ("without", "learned"):
        probes = sorted(row[way]["probes"] for row in rows)
        found[way] = {
            "median": median(probes),
            "mean": round(fmean(probes), 3),
            "p95": probes[math.ceil(0.95 * len(probes)) - 1],
            "worst": probes[-1],
            "two": round(fmean(count == 2 for count in probes), 3),
            "ooms": round(fmean(row[way]["ooms"] for row in rows), 3),
        }
    more = [row["learned"]["probes"] - row["without"]["probes"] for row in rows]
    found |= {"fewer": sum(it < 0 for it in more), "more": sum(it > 0 for it in more), "most_more": max(more)}
    return found


def show(name: str, found: Row) -> None:
    """Print the line of a markdown table."""
    cells = [
        f"{it['median']:g} / {it['mean']:.2f} / {it['worst']} | {it['ooms']:.2f}"
        for it in (found["without"], found["learned"])
    ]
    two = f"{found['without']['two']:.0%} / {found['learned']['two']:.0%}"
    print_row(name, *cells, two, f"{found['fewer']} / {found['more']}")


def oracles(seeds: int) -> Iterator[Row]:
    """A row for every kind of error: the second and later tunings of all sequences."""
    for name, errors in ERRORS.items():
        host = Host(CARD, {})
        rows = [row for seed in range(seeds) for row in list(sequence(host, oracle_cases(errors, seed)))[1:]]
        found = {"name": name, "sequences": seeds, **summary(rows)}
        show(name, found)
        yield found


def on_cpu(length: int) -> Row:
    """The sequence on the CPU, row by row."""
    device = find_device("cpu")
    with ProbeSupervisor(device) as runner:
        return _probed("GPT-2 on the CPU", device, runner, probed_cases(runner, ON_THE_CPU, length))


def on_virtual_card(length: int) -> Row:
    """A sequence of each family on a virtual card, row by row."""
    described = VirtualGpu.of(VIRTUAL_CARD)
    card = described.model_copy(update={"context_bytes": described.context_bytes + VIRTUAL_SURPLUS_BYTES})
    with virtual_supervisor(card) as runner:
        families = [
            {"family": name, **_probed(f"{name} on a virtual T4", device_of(described), runner, cases)}
            for name, draws in ON_A_VIRTUAL_CARD.items()
            for cases in (probed_cases(runner, draws, length),)
        ]
    return {"virtual": True, "surplus_bytes": VIRTUAL_SURPLUS_BYTES, "families": families}


def _probed(name: str, device: DeviceInfo, runner: ProbeSupervisor, cases: Sequence[Case]) -> Row:
    host = Host(device, runner.environment())
    rows = []
    for row in sequence(host, cases):
        rows.append(row)
        counts = f"{row['without']['probes']} / {row['learned']['probes']}"
        print(f"  {row['name']}: {row['largest']}, probes {counts}", file=sys.stderr, flush=True)
    found: Row = {"device": device.name, "summary": summary(rows[1:]), "rows": rows}
    show(name, found["summary"])
    return found


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__, "learned.json")
    parser.add_argument("--quick", action="store_true", help="5 tunings on the CPU, 3 sequences of oracles")
    parser.add_argument(
        "--only", choices=("oracles", "cpu", "virtual"), help="one of the parts; the output's others are kept"
    )
    parser.add_argument("--seeds", type=int, default=10, help="sequences of oracles for each kind of error")
    options = parser.parse_args()
    without = "without: median / mean / worst"
    print_head("sequence", without, "OOMs", "learned", "OOMs", "two probes", "fewer / more")
    document = read_result(options.output)
    if options.only in (None, "oracles"):
        document["oracles"] = {**measured_here(), "rows": list(oracles(3 if options.quick else options.seeds))}
    if options.only in (None, "cpu"):
        document["cpu"] = {**measured_here(), **on_cpu(5 if options.quick else LENGTH)}
    if options.only == "virtual":
        let_probes_import()
        document["virtual"] = {**measured_here(), **on_virtual_card(5 if options.quick else LENGTH)}
    write_result(options.output, document)


if __name__ == "__main__":
    main()
