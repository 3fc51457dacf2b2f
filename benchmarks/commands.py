"""The largest micro-batch of unmodified programs: ours, beside the finders of others put into them by hand.

python benchmarks/commands.py [--programs NAME ...] [--resume] [--size 12] [--around 1]
                              [--output benchmarks/results/commands.json]

Six programs of `tests/commands/programs/`, each under a budget half-way between the peaks of `--size` samples and of
one more. A scan of the sizes around, a fresh run of the program each, confirms that truth. Then every finder runs, in
an order drawn anew for each program: ours as `batchwright tune ... -- COMMAND`, which forks a process of the program
for every probe; the others in one process each (commands_peers.py), in which all their trials run.

Seconds are of the whole process, imports included. Processor seconds are those of its children too, and tell more where
the machine is not quiet. Ours runs the plan as it will be trained, by a probe of the search or after it; seconds of the
latter are reported apart. The others run no plan. An answer "fits" when a fresh run of the program at that size does. A
finder whose answer is below 90 % of the maximum, or does not fit, has no time to an answer within 10 %: the summary has
the median of these times, and counts the programs with one. The file is written after each program, and `--resume`
leaves out the programs that it has.
"""

import argparse
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from commands_peers import PEERS
from finders_trials import NEAR, OUTCOMES, Diary, Found, Trial, cells, figures, run_finder
from reporting import HERE, measured_here, new_parser, print_head, print_row, read_result, write_result

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.schemas import results
from tests.commands.program_list import FOLDER, ONE_THREAD, PLAIN, WITH_FRAMEWORKS, Program
from tests.commands.trials import budget_for, probe

OURS = "Batchwright"
PROGRAMS = {
    "plain loop": "plain_loop",
    "YAML": "yaml_settings",
    "accelerate": "accelerate_training",
    "LightningCLI": "lightning_training",
    "HF Trainer, arguments": "hugging_face_training",
    "TRL, LoRA, packing": "trl_fine_tuning",
}
"""The programs, and their modules, from which a peer takes model and data."""
EFFECTIVE_BATCH_SIZE = 120
"""Well above every answer, so that it never decides."""
TIMEOUT_SECONDS = 900.0
Row = dict[str, Any]


def environment() -> dict[str, str]:
    """The environment of every finder: the allocator's settings of our probes, and one thread."""
    return {**os.environ, **CPU_ENVIRONMENT, **ONE_THREAD}


def truth(program: Program, size: int, around: int) -> Row:
    """The budget, and which of the sizes around fit under it."""
    budget = budget_for(program, size)
    fits = {
        each: probe(program, each, budget).outcome is results.Outcome.FIT
        for each in range(max(1, size - around), size + around + 1)
    }
    failed = min((each for each, it in fits.items() if not it), default=max(fits) + 1)
    return {"limit_bytes": budget, "largest": failed - 1, "largest_ever": failed - 1, "fits": fits}


# --- the finders ---


def ours(program: Program, budget: int, folder: Path) -> tuple[Found, Row]:
    """`batchwright tune ... -- COMMAND`, and what its recommendation says besides."""
    answer = folder / "answer.json"
    options = [f"--effective-batch-size={EFFECTIVE_BATCH_SIZE}", f"--memory-limit={budget}", "--device=cpu"]
    variables = [f"--env={name}={value}" for name, value in program.spec()["model"]["environment"].items()]
    for name, text in program.files.items():
        (folder / name).write_text(text)
    templates = [f"--template={name}={folder / name}" for name in program.files]
    where = [f"--working-directory={program.folder}", "--memory-margin=0", "--no-uniform-only", f"--output={answer}"]
    tune = [sys.executable, "-m", "batchwright", "tune"]
    command = [*tune, *options, *variables, *templates, *where, "--", *program.argv]
    began = time.monotonic()
    ended = run_finder(command, Diary(folder / "ours.jsonl"), dict(os.environ), TIMEOUT_SECONDS)
    seconds = time.monotonic() - began
    if not answer.exists():
        return ended, {}
    found = json.loads(answer.read_text())
    probes = found["evidence"]["probes"]
    search = [it for it in probes if not it["verifies_plan"]]
    trials = tuple(
        Trial(it["micro_batch_size"], OUTCOMES.get(it["outcome"], "error"), it["seconds"]["total"]) for it in search
    )
    proof: Row = {
        "proof": found["evidence"]["plan_proof"],
        "seconds_of_plan": round(sum(it["seconds"]["total"] for it in probes if it["verifies_plan"]), 2),
    }
    planned = (found["plan"] or {}).get("micro_batch_size")
    return Found(found["largest_micro_batch_size"], planned, None, trials, seconds), proof


def peer(name: str, program: Program, budget: int, folder: Path) -> Found:
    """A finder of another, in the program's folder."""
    diary = Diary(folder / f"{abs(hash(name))}.jsonl")
    script = [str(HERE / "commands_peers.py"), name, PROGRAMS[program.name], str(budget), str(diary.path)]
    return run_finder([sys.executable, *script], diary, environment(), TIMEOUT_SECONDS)


def processor_seconds() -> float:
    """Processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(options: argparse.Namespace, programs: Iterable[str]) -> Iterator[Row]:
    """A program at a time: its truth, then all finders."""
    order = random.Random(0)
    there = {it.name: it for it in (*PLAIN, *WITH_FRAMEWORKS)}
    for name in programs:
        program = there[name]
        if reason := program.missing():
            raise SystemExit(f"{name}: {reason}")
        known = truth(program, options.size, options.around)
        finders: dict[str, Row] = {}
        with tempfile.TemporaryDirectory() as folder:
            for finder in order.sample([OURS, *PEERS], 1 + len(PEERS)):
                began = processor_seconds()
                found, proof = (
                    ours(program, known["limit_bytes"], Path(folder))
                    if finder == OURS
                    else (peer(finder, program, known["limit_bytes"], Path(folder)), {})
                )
                proof["processor_seconds"] = round(processor_seconds() - began, 2)
                fits = {found.answer: _fits(program, known, found.answer)} if found.answer else {}
                finders[finder] = figures(known, fits, [found]) | proof
        workload = {"name": name, "load": os.getloadavg()[0], "truth": known, "finders": finders}
        show(workload)
        yield workload


def _fits(program: Program, known: Row, answer: int) -> bool:
    told: Mapping[int, bool] = known["fits"]
    if answer in told:
        return told[answer]
    return probe(program, answer, known["limit_bytes"]).outcome is results.Outcome.FIT


# --- the tables ---


def show(workload: Row) -> None:
    """Print one program's table as markdown."""
    limit = workload["truth"]["limit_bytes"] / 1024**2
    print(f"\n{workload['name']}, {limit:.0f} MiB: {workload['truth']['largest']} (load {workload['load']:.1f})\n")
    print_head("finder", "answer", "of the maximum", "fits", "probes", "OOMs", "s", "s in trials", "processor s")
    for name in (OURS, *PEERS):
        it = workload["finders"][name]
        print_row(name, *cells(it), f"{it['processor_seconds']:.1f}")


def show_all(workloads: list[Row]) -> None:
    """Print the table of benchmarks/README.md: shares of the maximum, and seconds."""
    print(f"\n| finder | {' | '.join(it['name'] for it in workloads)} |\n|{'---|' * (1 + len(workloads))}")
    for name in (OURS, *PEERS):
        print(f"| {name} | {' | '.join(_cell(it['finders'][name]) for it in workloads)} |")


def _cell(found: Row) -> str:
    share = "none" if found["share"] is None else f"{found['share']:.0%}"
    return f"{share}{' (too large)' if found['fits'] is False else ''}, {found['seconds']:.1f} s"


def summary(workloads: list[Row]) -> Row:
    """Our target, and what became of it."""
    rows = [workload["finders"] for workload in workloads]
    mine = [finders[OURS] for finders in rows]
    return {
        "programs": len(rows),
        "exact": sum(it["exact"] for it in mine),
        "median_probes": median(it["probes"] for it in mine),
        "median_ooms": median(it["ooms"] for it in mine),
        "median_seconds": {name: median(finders[name]["seconds"] for finders in rows) for name in (OURS, *PEERS)},
        "median_seconds_to_near": {name: _to_near(finders[name] for finders in rows) for name in (OURS, *PEERS)},
        "plans_proven_in_search": sum(not it["seconds_of_plan"] for it in mine),
        "peers": {name: _peer_summary([finders[name] for finders in rows], mine) for name in PEERS},
    }


def _is_near(row_: Row) -> bool:
    """Return whether an answer fits, and is within 10 % of the maximum."""
    return bool(row_["fits"]) and (row_["share"] or 0.0) >= NEAR


def _to_near(rows: Iterable[Row]) -> float | None:
    """The median seconds over all programs, of which those without a near answer last for ever; none if most do."""
    seconds = median([it["seconds"] if _is_near(it) else math.inf for it in rows])
    return seconds if math.isfinite(seconds) else None


def _peer_summary(rows: list[Row], mine: list[Row]) -> Row:
    near = [(it, own) for it, own in zip(rows, mine, strict=True) if _is_near(it)]
    return {
        "answers": sum(it["answer"] is not None for it in rows),
        "exact": sum(it["exact"] for it in rows),
        "too_large": sum(it["fits"] is False for it in rows),
        "near": len(near),
        "faster_than_ours": sum(it["seconds"] < own["seconds"] for it, own in zip(rows, mine, strict=True)),
        "near_and_slower_than_ours": sum(own["seconds"] < it["seconds"] for it, own in near),
    }


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__, "commands.json")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, help="only these; all six when left out")
    parser.add_argument("--resume", action="store_true", help="only those that the output does not have yet")
    parser.add_argument("--size", type=int, default=12, help="the largest size, which the budget decides")
    parser.add_argument("--around", type=int, default=1, help="sizes of the scan on each side of it")
    options = parser.parse_args()
    output = options.output.absolute()
    os.chdir(FOLDER)  # from where the others import the programs
    earlier = read_result(output) if options.programs or options.resume else {}
    rows = {row["name"]: row for row in earlier.get("programs", ())}  # a run of some programs replaces these alone
    names = [name for name in options.programs or PROGRAMS if not options.resume or name not in rows]
    for workload in measured(options, names):
        rows[workload["name"]] = workload
        result = {"size": options.size, "summary": summary(list(rows.values())), "programs": list(rows.values())}
        write_result(output, measured_here("accelerate", "lightning", "trl", "peft") | result)
    show_all(list(rows.values()))
    print(json.dumps(summary(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
