"""Probes and OOMs of the search on oracles whose answer is known, next to what other finders do on the same oracles.

python benchmarks/search_oracles.py [--seeds 100] [--all] [--output benchmarks/results/search_oracles.json]

The peers are re-implemented from descriptions of their strategies and use nothing but "fits or not", as they do.
Ours is told the peak of every fit; each row pools intercepts of 0, 0.1, 0.3, 0.6 and 0.9 of the limit, half of the runs
with and half without the resident bytes, and a limit that is met anywhere between the answer and the next size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from statistics import fmean, median

from reporting import new_parser, print_head, print_row, write_result

from batchwright.planning.search import MicroBatchSearch
from batchwright.planning.search_space import SearchSpace
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks
from tests.support.oracles import (
    LIMIT_BYTES,
    Noise,
    Oracle,
    affine,
    biased,
    device,
    exact,
    failures,
    floored,
    independent,
    per_sample,
    run_search,
    wobble,
)

BOUND = 4096
LARGEST = (37, 200, 3000)
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9)
Fits = Callable[[int], bool]
Row = dict[str, float | str]

NOISES: dict[str, Callable[[int], Noise]] = {
    "exact": lambda _seed: exact(),
    "samples vary by 2 %": lambda seed: per_sample(0.02, seed),
    "device, sd 0.05 % of total": lambda seed: device(0.0005, seed),
    "device, +-0.34 % of total": lambda seed: independent(0.0034, seed, total=True),
    "device, +-0.9 % of total": lambda seed: independent(0.009, seed, total=True),
    "smooth wobble of 2 %": lambda seed: wobble(0.02, seed),
    "+-2 % of activations": lambda seed: independent(0.02, seed, total=False),
    "+-2 % of total": lambda seed: independent(0.02, seed, total=True),
}
ESTIMATES = {
    "right": (0.0, 0.0),
    "activations 5 % high": (0.05, 0.0),
    "activations 5 % low": (-0.05, 0.0),
    "2 % of the limit high": (0.0, 0.02),
    "2 % of the limit low": (0.0, -0.02),
    "activations 20 % low": (-0.2, 0.0),
    "activations twice": (1.0, 0.0),
}
"""How far the estimate is off: the slope, and the whole as a share of the limit."""
REPLAYS = {
    "right": 0.0,
    "1 % high": 0.01,
    "1 % low": -0.01,
    "5 % high": 0.05,
    "5 % low": -0.05,
}
"""How far the place is off at which replays run out of memory, as a share of the limit. 8 % of the limit are lost."""
_LOST = 0.08
OTHERS: dict[str, Callable[[int, float], Oracle]] = {
    "floor up to 0.3 of the answer": lambda largest, share: floored(largest, share=share, until=0.3),
    "limit really 5 % lower": lambda largest, share: biased(largest, share=share, bias=0.05),
    "no memory figures": lambda largest, _share: Oracle(largest),
}


def accelerate(fits: Fits, start: int) -> int:
    """Accelerate's find_executable_batch_size: nine tenths of the size until one fits."""
    size = start
    while size > 0 and not fits(size):
        size = int(size * 0.9)
    return size


def lightning_power(fits: Fits) -> int:
    """Lightning's power mode: double from 2 until a size fails, then take the last."""
    size = 2
    while fits(size):
        size *= 2
    return size // 2


def lightning_binsearch(fits: Fits) -> int:
    """Lightning's binsearch mode: double, halve the interval down to one, then take 5 % off."""
    low = lightning_power(fits)
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return int(low * 0.95)


def nemo(fits: Fits) -> int:
    """NeMo's OOMptimizer: double or halve from 32, then halve the interval until a failure leaves a gap under 5 %."""
    size, fitting, failing = 32, 0, 0
    while True:
        if fits(size):
            fitting = size
        else:
            failing = size
            if fitting and (failing - fitting) / failing < 0.05:
                return fitting
        size = round((fitting + failing) / 2) if fitting and failing else 2 * fitting or failing // 2


PEERS: dict[str, Callable[[Fits], int]] = {
    "accelerate (128)": lambda fits: accelerate(fits, 128),
    "accelerate (4096)": lambda fits: accelerate(fits, 4096),
    "Lightning power": lightning_power,
    "Lightning binsearch": lightning_binsearch,
    "NeMo OOMptimizer": nemo,
}


def run_peer(finder: Callable[[Fits], int], largest: int) -> tuple[int, int, int]:
    """Probes, OOMs and answer of a peer."""
    outcomes: list[bool] = []

    def fits(size: int) -> bool:
        outcomes.append(size <= largest)
        return outcomes[-1]

    answer = finder(fits)
    return len(outcomes), outcomes.count(False), answer


def run_ours(oracle: Oracle, *, knows_limit: bool = True, estimate: ExpectedPeaks | None = None) -> tuple[int, int]:
    """Probes and OOMs of our search, whose answer is checked."""
    limit = oracle.limit_bytes if knows_limit else None
    search = MicroBatchSearch(SearchSpace(BOUND, "the benchmark's bound", limit_bytes=limit, expected=estimate))
    results = run_search(search, oracle)
    assert isinstance(search.verdict, Proof)
    assert search.verdict.fits == oracle.largest
    return len(results), failures(results)


def summary(oracle: str, largest: int, share: str, courses: list[tuple[int, int]]) -> Row:
    """The distribution of probes and OOMs over many runs."""
    row: Row = {"oracle": oracle, "largest": largest, "intercept": share, "runs": len(courses)}
    for name, column in (("probes", [it[0] for it in courses]), ("ooms", [it[1] for it in courses])):
        p95 = sorted(column)[math.ceil(0.95 * len(column)) - 1]
        row |= {f"{name}_mean": round(fmean(column), 2), f"{name}_median": median(column), f"{name}_p95": p95}
        row[f"{name}_max"] = max(column)
    row["within_6_and_2"] = round(fmean(probes <= 6 and ooms <= 2 for probes, ooms in courses), 3)
    return row


def courses_of(name: str, largest: int, share: float, seeds: int) -> list[tuple[int, int]]:
    """Our runs on one kind of oracle."""
    if name in OTHERS:
        return [run_ours(OTHERS[name](largest, share), knows_limit=name != "no memory figures")]
    return [
        run_ours(
            affine(
                largest,
                share=share,
                noise=NOISES[name](seed),
                knows_resident=seed % 2 == 0,
                fraction=Random(seed).uniform(0.02, 0.98),
            )
        )
        for seed in range(seeds)
    ]


def estimate_of(oracle: Oracle, share: float, slope_error: float, offset: float) -> ExpectedPeaks:
    """An estimate whose activations are off by ``slope_error``, and all of it by ``offset`` (a share of the limit)."""
    assert oracle.memory is not None
    limit = oracle.limit_bytes or 0
    constant = share * limit
    used = {it: constant + (oracle.memory(it) - constant) * (1 + slope_error) + offset * limit for it in (1, BOUND)}
    points = tuple(ExpectedPeak(micro_batch_size=it, used_bytes=max(1, round(value))) for it, value in used.items())
    return ExpectedPeaks(points=points, resident_bytes=max(0, round(0.75 * constant + offset * limit)))


def led(seeds: int) -> Iterator[Row]:
    """The same for searches that an estimate leads, on a device with 0.05 % of noise."""
    for name, (slope_error, offset) in ESTIMATES.items():
        for largest in LARGEST:
            courses = []
            for share in SHARES:
                for seed in range(seeds):
                    fraction = Random(seed).uniform(0.02, 0.98)
                    noisy = affine(largest, share=share, noise=device(0.0005, seed), fraction=fraction)
                    estimate = estimate_of(affine(largest, share=share, fraction=fraction), share, slope_error, offset)
                    courses.append(run_ours(noisy, estimate=estimate))
            yield summary(f"led by an estimate: {name}", largest, "all", courses)


def replayed(seeds: int) -> Iterator[Row]:
    """Oracles where fragmentation loses a part of the limit, which the replays of an estimate foresee with an error."""
    for name, error in REPLAYS.items():
        for largest in LARGEST:
            courses = []
            for share in SHARES:
                for seed in range(seeds):
                    fraction = Random(seed).uniform(0.02, 0.98)
                    left = round((1 - _LOST) * LIMIT_BYTES)
                    noise = device(0.0005, seed)
                    noisy = affine(largest, share=share, noise=noise, fraction=fraction, limit_bytes=left)
                    true = affine(largest, share=share, fraction=fraction, limit_bytes=left)
                    estimate = estimate_of(true, share, 0.0, 0.0)
                    replays_fit = int((largest + fraction) * (1 + error / (1 - _LOST) / (1 - share)))
                    usable = estimate.used_bytes(max(0, replays_fit) + 0.5)
                    estimate = estimate.model_copy(update={"usable_bytes": round(usable)})
                    courses.append(run_ours(replace(noisy, limit_bytes=LIMIT_BYTES), estimate=estimate))
            yield summary(f"replayed: {name}", largest, "all", courses)


def ours(seeds: int) -> Iterator[Row]:
    """A row for every kind of oracle, answer and intercept, and one over all intercepts."""
    yield from led(seeds)
    yield from replayed(seeds)
    for name in [*NOISES, *OTHERS]:
        for largest in LARGEST:
            cells = {share: courses_of(name, largest, share, seeds) for share in SHARES}
            yield summary(name, largest, "all", [course for cell in cells.values() for course in cell])
            for share, cell in cells.items():
                yield summary(name, largest, f"{share:g}", cell)


def peers() -> list[Row]:
    """A row for every peer and answer."""
    found: list[Row] = []
    for name, finder in PEERS.items():
        for largest in LARGEST:
            probes, ooms, answer = run_peer(finder, largest)
            found.append({"finder": name, "largest": largest, "probes": probes, "ooms": ooms, "answer": answer})
    return found


def show(rows: list[Row], other: list[Row], *, every_intercept: bool) -> None:
    """Print both tables as markdown."""
    names = ["mean", "median", "p95", "max"]
    order = "/".join(names)
    print_head("oracle", "largest", "intercept", f"probes {order}", f"OOMs {order}", "within 6 and 2")
    for row in rows:
        if every_intercept or row["intercept"] == "all":
            probes, ooms = ("/".join(f"{row[f'{kind}_{name}']:g}" for name in names) for kind in ("probes", "ooms"))
            within = f"{100 * float(row['within_6_and_2']):.1f} %"
            print_row(row["oracle"], row["largest"], row["intercept"], probes, ooms, within)
    print()
    print_head("finder", "largest", "probes", "OOMs", "answer")
    for row in other:
        print_row(*row.values())


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__, "search_oracles.json")
    parser.add_argument("--seeds", type=int, default=100, help="runs per kind of oracle, answer and intercept")
    parser.add_argument("--all", action="store_true", help="print a row per intercept")
    arguments = parser.parse_args()
    rows, other = list(ours(arguments.seeds)), peers()
    show(rows, other, every_intercept=arguments.all)
    write_result(arguments.output, {"bound": BOUND, "seeds": arguments.seeds, "ours": rows, "peers": other})


if __name__ == "__main__":
    main()
