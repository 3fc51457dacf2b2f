"""The three jobs of examples/side_by_side by Batchwright, accelerate and Lightning: sizes, effective batches, errors.

python benchmarks/side_by_side.py [--only NAME ...] [--quick] [--output benchmarks/results/side_by_side.json]

Every script runs unchanged in a process of its own, with the allocator's settings of a probe, and limits its own memory
(``common_task.limit_memory``). ``side_by_side_recorder.py`` records its updates. The error of an update is the largest,
over all tensors, of max|gradient - reference| / max|reference|, where the reference is the gradient in fp64 of the mean
over all bytes of the samples that were in that update, as one batch at the same weights.

A second run of each script (``--long-sample``) has a sample late in the epoch that is twice as long as those that the
size was found with, so that its micro-batch does not fit. The true largest size is found as in finders.py: by doubling
and halving, and then by a scan of the sizes around, a fresh process for each. ``--quick`` leaves out both.
"""

import ast
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accumulation_task import error_of
from finders import Bench, Scan, truth_of
from finders_workloads import Case
from reporting import HERE, let_probes_import, measured_here, new_parser, write_result
from torch import Tensor

from batchwright.hardware.inventory import cpu
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import parse_spec

SCRIPTS = HERE.parent / "examples" / "side_by_side"
sys.path.append(str(SCRIPTS))

from common_task import (  # noqa: E402 - found only now
    EFFECTIVE_BATCH_SIZE,
    LENGTH,
    LONG_SAMPLE,
    MEMORY_LIMIT_BYTES,
    SAMPLES,
    Paragraphs,
    build_model,
    collate,
    loss,
)
from side_by_side_recorder import EVENTS  # noqa: E402 - imports common_task

WAYS = {
    "Batchwright": "with_batchwright.py",
    "accelerate": "with_accelerate.py",
    "accelerate, by token": "with_accelerate_by_token.py",
    "Lightning": "with_lightning.py",
}
LIBRARIES = ("accelerate", "lightning")
TIMEOUT_SECONDS = 600.0
SCAN = Scan(around=3, repeats=2)
Row = dict[str, Any]


# --- a run of a script ---


@dataclass
class Run:
    """The output of a script, and the updates of its last pass over the samples.

    Attributes:
        error: last line of an error that ended the script; None if it ended well.
        passes: size of the first micro-batch of each pass that was begun, those of the search included.
        updates: samples of each update of the last pass, by their numbers.
        errors: error of each update's gradient.
    """

    output: str
    error: str | None
    passes: list[int] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def run_script(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Run a script in a process of its own, and read what was recorded of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(HERE / "side_by_side_recorder.py"), str(folder), str(script), *arguments]
        done = subprocess.run(  # noqa: S603 - a file beside this one, by this interpreter
            command,
            cwd=folder,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        run = Run(done.stdout, None if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:300])
        steps = read_events(run, folder / EVENTS)
        samples = Paragraphs(has_long_sample="--long-sample" in arguments)
        for step, update in zip(steps, run.updates, strict=True):
            run.errors.append(update_error(folder, step, [samples[number] for number in update]))
    return run


def read_events(run: Run, path: Path) -> list[int]:
    """Add the passes and updates to ``run``. Return the numbers of the updates' steps.

    A micro-batch with the first sample begins a pass, and ends the one before. Samples of a micro-batch that is run
    again, in parts, count once.
    """
    steps: list[int] = []
    unfinished: set[int] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "step" in event:
            steps.append(event["step"])
            run.updates.append(sorted(unfinished))
            unfinished = set()
        else:
            if 0 in event["micro_batch"]:
                run.passes.append(len(event["micro_batch"]))
                run.updates, steps, unfinished = [], [], set()
            unfinished |= set(event["micro_batch"])
    return steps


def update_error(folder: Path, step: int, samples: list[Tensor]) -> float:
    """Compare the gradient of a recorded update with that of its samples as one batch, in fp64."""
    model = build_model().double()
    parameters = list(model.parameters())
    for parameter, value in zip(parameters, read_tensors(folder / f"{step}.weights", parameters), strict=True):
        parameter.data = value.double()
    loss_sum, weight = loss(model, collate(samples))
    references = torch.autograd.grad(loss_sum / weight, parameters)
    return error_of(list(read_tensors(folder / f"{step}.gradients", parameters)), list(references))


def read_tensors(path: Path, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Read tensors in fp32 of these shapes, written one after the other."""
    with path.open("rb") as stream:
        for tensor in like:
            yield torch.from_numpy(np.fromfile(stream, np.float32, math.prod(tensor.shape))).reshape(tensor.shape)


# --- figures ---


def code_lines(script: Path) -> int:
    """Count the lines of a script without docstrings, comments and blank lines."""
    text = script.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in docstrings for number, line in lines)


def sizes_tried(name: str, run: Run) -> list[int]:
    """Sizes that the search tried: those that ours prints, and those of the passes that the others began."""
    if name == "Batchwright":
        (line,) = re.findall(r"^tried: (.*)$", run.output, flags=re.MULTILINE)
        return [int(size) for size in re.findall(r"(\d+) [A-Z]", line)]
    return run.passes[:-1] if name == "Lightning" else run.passes  # accelerate's last trial is the training itself


def figures(name: str, run: Run, truth: int | None) -> Row:
    """The figures of a run that ended well."""
    (found,) = map(int, re.findall(r"^largest: (\d+)", run.output, flags=re.MULTILINE))
    return {
        "found": found,
        "share": None if truth is None else round(found / truth, 4),
        "tried": sizes_tried(name, run),
        **updates_of(run),
        "error_full_window": max(run.errors[:-1]),
        "error_last_window": run.errors[-1],
    }


def updates_of(run: Run) -> Row:
    """The effective batches of the last pass, and the errors of their gradients."""
    return {"effective_batch_sizes": [len(update) for update in run.updates], "errors": run.errors}


def at_the_limit(name: str, run: Run) -> Row:
    """The end of a run whose samples do not all fit."""
    passes = {} if name == "Batchwright" else {"passes": run.passes}  # ours compares losses before its only pass
    return {"error": run.error, "printed": run.output.splitlines(), **passes, **updates_of(run)}


def measured(name: str, environment: Mapping[str, str], truth: int | None, *, quick: bool) -> Row:
    """Run one way, and once more with the long sample unless ``quick``.

    Raises:
        RuntimeError: when the script fails with samples that fit.
    """
    script = SCRIPTS / WAYS[name]
    run = run_script(script, (), environment)
    if run.error is not None:
        raise RuntimeError(f"{script.name}: {run.error}")
    row = {"script": script.name, "code_lines": code_lines(script), **figures(name, run, truth)}
    if not quick:
        row["with_long_sample"] = at_the_limit(name, run_script(script, ["--long-sample"], environment))
    print(f"{name}: {json.dumps(row)}", flush=True)
    return row


def true_size(bench: Bench) -> Row:
    """Find the largest size that always fits, as in finders.py."""
    request = TuningRequest(
        spec=parse_spec({"model": {"kind": "python", "target": "side_by_side_workload:CommonTask"}}),
        effective_batch_size=EFFECTIVE_BATCH_SIZE,
        device="cpu",
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
        memory_margin=0.0,
    )
    _, truth = truth_of(bench, Case("side by side", request), SCAN, {})
    return truth


def main() -> None:
    """Run, print, write."""
    parser = new_parser(__doc__, "side_by_side.json")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help="only these")
    parser.add_argument("--quick", action="store_true", help="no truth, and no run with the long sample")
    options = parser.parse_args()
    let_probes_import(SCRIPTS)
    bench = Bench(cpu())
    truth = None if options.quick else true_size(bench)
    print(f"largest size that fits: {truth}", flush=True)
    largest = None if truth is None else truth["largest"]
    ways = {name: measured(name, bench.environment(), largest, quick=options.quick) for name in options.only}
    libraries = () if options.only == ["Batchwright"] else LIBRARIES
    task = {
        "effective_batch_size": EFFECTIVE_BATCH_SIZE,
        "memory_limit_bytes": MEMORY_LIMIT_BYTES,
        "samples": SAMPLES,
        "longest_sample": LENGTH,
        "long_sample": LONG_SAMPLE,
    }
    write_result(options.output, measured_here(*libraries) | {"task": task, "truth": truth, "ways": ways})


if __name__ == "__main__":
    main()
