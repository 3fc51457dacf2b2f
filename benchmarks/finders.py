"""The largest micro-batch that fits: ours against the finders of accelerate, Lightning and NeMo, and against the truth.

python benchmarks/finders.py [--workloads NAME ...] [--quick] [--no-peers] [--rounds 1] [--device cpu] [--truth FILE]
                             [--output benchmarks/results/finders.json]

Eight workloads (finders_workloads.py) under a memory budget each: a real limit of the process on the CPU, half-way
between the measured peaks of two sizes, and a share of the card on CUDA. The truth is found by doubling and halving
with a fresh process per size, and then by a scan of every size from ``--around`` below to as many above, ``--repeats``
times each: the largest that always fits, and the largest that ever did, where the two differ. It is taken from an
earlier run, ``--truth``, while nothing has changed that it depends on. Then every finder runs in a process of its own,
in an order drawn anew per workload: ours as one command, with ``--quick``, and as a running service runs it
(finders_ours.py), the peers as their users run them (finders_peers.py), under the same budget and with the same
allocator's settings.

Seconds are of the whole process, imports included (with ours as a command, the start of its fork server). An answer
"fits" when a probe of ours in a fresh process, two updates of two micro-batches, runs at that size; where it does not,
the same in plain torch is tried, without our engine. Our answer is the largest size that was proven, in such updates.
Our plan may have to be smaller, as its last micro-batch may differ from the others: ``plan`` is its largest one. With
``--quick`` the answer is that of the one plan that runs, which an estimate is sure of: no larger size is tried.
"""

import argparse
import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from finders_peers import PEERS
from finders_trials import NEAR, Diary, Found, cells, figures, run_finder
from finders_workloads import Case, cases
from reporting import (
    HERE,
    let_probes_import,
    measured_here,
    new_parser,
    print_head,
    print_row,
    read_result,
    write_result,
)

import batchwright
from batchwright.errors import WorkloadError
from batchwright.hardware.inventory import find_device
from batchwright.planning.fingerprint import canonical_json, installed_versions
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult

OURS, ONE_PLAN, SERVED = "Batchwright", "Batchwright, --quick", "Batchwright, served"
WAYS = {OURS: "command", ONE_PLAN: "quick", SERVED: "served"}
QUICK = ("LSTM", "ResNet-50")
TIMEOUT_SECONDS = 600.0
_PLANNING_CODE = ("planning/session.py", "planning/accumulation.py")
MEASURING_CODE = ("hardware", "training", "workloads", "probing/child", *_PLANNING_CODE)
"""What, besides a tuning's fingerprint, a probe's outcome depends on."""
Row = dict[str, Any]


class Bench:
    """One device, and probes of it in fresh processes."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        with ProbeSupervisor(device) as runner:
            self._environment = runner.environment()

    def tuning(self, case: Case) -> TuningSession:
        """A tuning, for what it knows about the request."""
        return TuningSession(case.request, self.device, environment=self._environment, versions=installed_versions())

    @contextmanager
    def probes(self, case: Case) -> Iterator[Callable[[int], bool]]:
        """Whether a size fits, by a probe from a fork server of their own.

        Raises:
            WorkloadError: when one fails for another reason than memory.
        """
        with self._probes(case) as run:
            yield lambda size: run(size).outcome is Outcome.FIT

    @contextmanager
    def _probes(self, case: Case) -> Iterator[Callable[[int], ProbeResult]]:
        first = self.tuning(case).next_probe()
        assert first is not None
        with ProbeSupervisor(self.device) as runner:

            def run(size: int) -> ProbeResult:
                result = runner.run(first.model_copy(update={"micro_batch_size": size}))
                if result.outcome not in (Outcome.FIT, Outcome.OOM):
                    raise WorkloadError(f"{case.name} at micro-batch {size}: {result.outcome}: {result.message}")
                return result

            yield run

    def budget(self, case: Case) -> int:
        """Bytes half-way between the peaks of the case's size and of the next, each from two fork servers.

        Where a sample takes less than peaks differ by, no budget has one answer: then of the next size, up to three on.

        Raises:
            WorkloadError: when no such size has a budget.
        """
        assert case.size is not None
        for size in range(case.size, case.size + 4):
            below, above = self._peaks(case, size)
            if below < above:
                return (below + above) // 2
        raise WorkloadError(f"{case.name}: {size} took {below} bytes, and {size + 1} took {above}")

    def _peaks(self, case: Case, size: int) -> tuple[int, int]:
        """The larger peak of a size, and the smaller one of the next."""
        peaks: dict[int, list[int]] = {size: [], size + 1: []}
        for _ in range(2):
            with self._probes(case) as run:
                for number, found in peaks.items():
                    found.append(run(number).process_peak_bytes or 0)
        return max(peaks[size]), min(peaks[size + 1])

    def environment(self) -> dict[str, str]:
        """What every finder's process starts with."""
        return {**os.environ, **self._environment}


# --- the truth ---


@dataclass(frozen=True)
class Scan:
    """Which sizes are scanned, and how often each, every time from another fork server."""

    around: int
    repeats: int


def truth_of(bench: Bench, case: Case, scan: Scan, known: Mapping[str, Row]) -> tuple[Case, Row]:
    """The case under its budget, and what a scan found; from an earlier run if nothing has changed."""
    fingerprint = truth_fingerprint(bench.tuning(case), scan)
    earlier = known.get(case.name)
    if earlier is not None and earlier["fingerprint"] == fingerprint:
        return case.under(earlier["limit_bytes"]), dict(earlier)
    if earlier is not None:
        print(f"{case.name}: what its truth depends on has changed; scanned anew", file=sys.stderr)
    limit_bytes = case.request.memory_limit_bytes if case.size is None else bench.budget(case)
    assert limit_bytes is not None
    case = case.under(limit_bytes)
    with bench.probes(case) as fits_now:
        near = halved(fits_now, case.request.effective_batch_size)
    fits = dict.fromkeys(range(max(1, near - scan.around), near + scan.around + 1), 0)
    for _ in range(scan.repeats):
        with bench.probes(case) as fits_now:
            for size in fits:
                fits[size] += fits_now(size)
    found = {"limit_bytes": limit_bytes, **verdict(fits, scan.repeats), "repeats": scan.repeats, "fits": fits}
    return case, {"fingerprint": fingerprint, **found}


def verdict(fits: Mapping[int, int], repeats: int) -> Row:
    """The largest size below which (itself included) every try fitted, and the largest that ever did."""
    failed = min((size for size, count in fits.items() if count < repeats), default=max(fits) + 1)
    always = max((size for size in fits if size < failed), default=failed - 1)
    return {"largest": always, "largest_ever": max((size for size, count in fits.items() if count), default=always)}


def halved(fits: Callable[[int], bool], bound: int) -> int:
    """The largest size that fits, by doubling and halving and nothing else."""
    low, high = 0, 1
    while high <= bound and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def truth_fingerprint(tuning: TuningSession, scan: Scan) -> str:
    """SHA-256 of what a scan depends on: the tuning's own fingerprint, the code that a probe runs, the scan."""
    root = Path(batchwright.__file__).parent
    paths = [root / name for name in MEASURING_CODE]
    sources = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    sources.append(HERE / "finders_workloads.py")
    digests = {str(path.relative_to(HERE.parent)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    parts = {"tuning": tuning.fingerprint, "code": digests, "scan": asdict(scan)}
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


# --- the finders ---


class Finders:
    """The finders' processes on one workload."""

    def __init__(self, bench: Bench, case: Case, folder: Path) -> None:
        self._environment = bench.environment()
        self._folder = folder
        self._request = folder / "request.json"
        self._request.write_text(case.request.model_dump_json(), encoding="utf-8")
        self._runs = 0

    def run(self, name: str) -> Found:
        """One run of one finder."""
        self._runs += 1
        script = ["finders_ours.py", WAYS[name]] if name in WAYS else ["finders_peers.py", name]
        diary = Diary(self._folder / f"{self._runs}.jsonl")
        command = [sys.executable, str(HERE / script[0]), *script[1:], str(self._request), str(diary.path)]
        return run_finder(command, diary, self._environment, TIMEOUT_SECONDS)

    def run_all(self, names: Iterable[str], rounds: int, order: random.Random) -> dict[str, list[Found]]:
        """Every finder of these names, ``rounds`` times, in an order of its own each time."""
        found: dict[str, list[Found]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in order.sample(list(found), len(found)):
                found[name].append(self.run(name))
        return found


def fitting(bench: Bench, case: Case, finders: Finders, answers: Iterable[int | None]) -> dict[int, str]:
    """Whether each answer fits: ``yes``, ``no``, or ``without our engine`` where it does in plain torch."""
    found = {}
    with bench.probes(case) as fits_now:
        for answer in {it for it in answers if it}:
            found[answer] = "yes" if fits_now(answer) else "no"
    for answer in [size for size, told in found.items() if told == "no"]:
        if finders.run(f"plain {answer}").answer == answer:
            found[answer] = "without our engine"
    return found


def chosen_cases(device: DeviceInfo, options: argparse.Namespace) -> list[Case]:
    """The workloads asked for."""
    there = {case.name: case for case in cases(device)}
    names = options.workloads or (QUICK if options.quick else there)
    if unknown := [name for name in names if name not in there]:
        raise SystemExit(f"no workload is called {unknown[0]}: there are {', '.join(there)}")
    return [there[name] for name in names]


def measured(bench: Bench, options: argparse.Namespace, known: Mapping[str, Row]) -> Iterator[Row]:
    """A workload at a time: its truth, then all finders."""
    order = random.Random(0)
    for case in chosen_cases(bench.device, options):
        case, truth = truth_of(bench, case, Scan(options.around, options.repeats), known)  # noqa: PLW2901 - its budget
        with tempfile.TemporaryDirectory() as folder:
            finders = Finders(bench, case, Path(folder))
            found = finders.run_all(WAYS if options.no_peers else (*WAYS, *PEERS), options.rounds, order)
            fits = fitting(bench, case, finders, [runs[-1].answer for runs in found.values()])
        workload = {
            "name": case.name,
            "limit_bytes": case.request.memory_limit_bytes,
            "truth": truth,
            "finders": {name: figures(truth, fits, runs) for name, runs in found.items()},
        }
        show(workload)
        yield workload


# --- the tables ---


def show(workload: Row) -> None:
    """Print one workload's table as markdown."""
    truth = workload["truth"]
    sometimes = f" (now and then {truth['largest_ever']})" if truth["largest_ever"] != truth["largest"] else ""
    print(f"\n{workload['name']}, {workload['limit_bytes'] / 1024**2:.0f} MiB: {truth['largest']}{sometimes}\n")
    print_head("finder", "answer", "of the maximum", "fits", "probes", "OOMs", "s", "s in trials")
    for name, it in workload["finders"].items():
        print_row(name, *cells(it))


def summary(workloads: Iterable[Row]) -> Row:
    """Our target, and what became of it."""
    rows = [workload["finders"] for workload in workloads]
    peers = [name for name in PEERS if name in rows[0]]
    ours = [finders[OURS] for finders in rows]
    others = [(finders, it) for finders in rows for name, it in finders.items() if name not in WAYS]
    near = [(finders, it) for finders, it in others if (it["share"] or 0.0) >= NEAR]
    return {
        "workloads": len(rows),
        "exact": sum(it["exact"] for it in ours),
        "median_probes": median(it["probes"] for it in ours),
        "median_ooms": median(it["ooms"] for it in ours),
        "near_peers": len(near),
        "near_peers_that_fit": sum(peer["fits"] == "yes" for _, peer in near),
        "faster_than_near_peers": {
            way: sum(finders[way]["seconds"] < peer["seconds"] for finders, peer in near) for way in WAYS
        },
        "seconds": {name: round(sum(finders[name]["seconds"] for finders in rows), 1) for name in (*WAYS, *peers)},
        "others": {name: _answers([finders[name] for finders in rows]) for name in (ONE_PLAN, *peers)},
    }


def _answers(rows: list[Row]) -> Row:
    shares = [it["share"] for it in rows if it["share"] is not None]
    return {
        "answers": len(shares),
        "exact": sum(it["exact"] for it in rows),
        "median_share": round(median(shares), 4) if shares else None,
        "too_large": sum(it["fits"] not in ("yes", None) for it in rows),
        "median_probes": median(it["probes"] for it in rows),
        "median_ooms": median(it["ooms"] for it in rows),
    }


def show_summary(found: Row) -> None:
    """Print it."""
    medians = f"median {found['median_probes']:g} probes and {found['median_ooms']:g} OOMs"
    faster = found["faster_than_near_peers"]
    near = f"{found['near_peers']} answers of peers are within {1 - NEAR:.0%} of the maximum"
    print(f"\n{OURS}: exact on {found['exact']} of {found['workloads']}; {medians}.")
    print(f"{near}; {found['near_peers_that_fit']}")
    print(f"of them fit. Our command is faster than {faster[OURS]} of them (with --quick than {faster[ONE_PLAN]}), a")
    print(f"running service than {faster[SERVED]}.\n")
    print_head("finder", "answers", "exact", "median share", "too large", "median probes", "median OOMs")
    for name, it in found["others"].items():
        share = "-" if it["median_share"] is None else f"{it['median_share']:.1%}"
        medians_of_peer = (f"{it['median_probes']:g}", f"{it['median_ooms']:g}")
        print_row(name, it["answers"], it["exact"], share, it["too_large"], *medians_of_peer)


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", help="only these; all eight when left out")
    parser.add_argument("--quick", action="store_true", help=f"short for --workloads {' '.join(QUICK)}")
    parser.add_argument("--no-peers", action="store_true", help="our own alone, beside the truth")
    parser.add_argument("--rounds", type=int, default=1, help="times every finder runs on every workload")
    parser.add_argument("--around", type=int, default=3, help="sizes of the scan on each side of the answer")
    parser.add_argument("--repeats", type=int, default=2, help="fork servers, each of which scans every size")
    parser.add_argument("--device", help="cpu or cuda:N; the first GPU, else the CPU, when left out")
    parser.add_argument("--truth", type=Path, help="take the truth from this earlier result where it still holds")
    parser.add_argument("--output", type=Path, help="benchmarks/results/finders.json, or finders_cuda.json on a card")
    options = parser.parse_args()
    let_probes_import()
    device = find_device(options.device)
    output = options.output or HERE / "results" / ("finders.json" if device.kind == "cpu" else "finders_cuda.json")
    known = {row["name"]: row["truth"] for row in read_result(options.truth or output).get("workloads", ())}
    workloads: list[Row] = []
    for workload in measured(Bench(device), options, known):
        workloads.append(workload)
        result = {"rounds": options.rounds, "summary": summary(workloads), "workloads": workloads}
        write_result(output, measured_here("accelerate", "lightning", device=device.name) | result)
    show_summary(summary(workloads))


if __name__ == "__main__":
    main()
