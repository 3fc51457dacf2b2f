"""The cost in time, and the gain in memory, of having MKL give its packing buffers back (``MKL_DISABLE_FAST_MM=1``).

python benchmarks/cpu_math_buffers.py [--rounds 10] [--models NAME ...] [--label TEXT]
                                     [--output benchmarks/results/cpu_math_buffers.json]

Probes on the CPU, and the jobs made from them, run with that setting, which MKL reads when it is first used. So every
measurement is a process of its own, with or without the setting and else with all that probes set, in turns: the order
of the two changes from round to round. Each makes two updates to warm up and then some more, of two micro-batches, and
tells the CPU seconds that its threads spent on one (other processes do not count) and the peak of its private memory.

MKL decides by the make of the CPU which code it runs, and on AMD's it keeps little. ``--label`` names the rows of a run
in the file, beside those of other runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from cpu_repeatability import requests
from reporting import measured_here, new_parser, print_head, read_result, write_result

from batchwright.device_traits import CPU_ENVIRONMENT, CPU_MATH
from batchwright.hardware.inventory import cpu
from batchwright.schemas.workload import WorkloadSpec, parse_spec

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 256}
SIZES = {"gpt2": 40, "gpt": 64, "mlp": 2048, "resnet": 32}
UPDATES = 8
WARM_UP = 2


def specs() -> dict[str, WorkloadSpec]:
    """The README's GPT-2, and the models of ``cpu_repeatability.py``."""
    readme = {
        "model": {"kind": "transformers", "task": "causal-lm", "config": GPT2},
        "batch": {"sequence_length": 64},
        "optimizer": {"name": "adamw", "learning_rate": 0.001},
        "gradient_clipping": 1.0,
    }
    return {"gpt2": parse_spec(readme), **{name: it.workload for name, it in requests().items()}}


def measure(name: str) -> dict[str, float]:
    """In a process of its own: CPU seconds of an update, and the peak of private memory in bytes."""
    from batchwright.hardware.memory_devices.factory import open_device  # noqa: PLC0415 - torch is not for the process that starts others
    from batchwright.training.accumulation.collectives import Ranks  # noqa: PLC0415
    from batchwright.training.micro_batches.splitting import sliced  # noqa: PLC0415
    from batchwright.training.update_engine import UpdateEngine  # noqa: PLC0415
    from batchwright.workloads.build import build_model, build_workload  # noqa: PLC0415

    spec, size = specs()[name], SIZES[name]
    workload = build_workload(spec)
    model = build_model(spec, workload)
    device = open_device("cpu")
    engine = UpdateEngine(spec, workload, model, device, ranks=Ranks(), recovers=False)
    micro_batches = [sliced(workload.make_batch(size), size) for _ in range(2)]
    for _ in range(WARM_UP):
        engine.update(micro_batches)
    began = time.process_time()
    for _ in range(UPDATES):
        engine.update(micro_batches)
    return {"cpu_seconds": (time.process_time() - began) / UPDATES, "peak_bytes": device.peak_bytes()}


def measured(name: str, *, gives_back: bool) -> dict[str, float]:
    """Measurements of a fresh process, with the setting or without."""
    every = {**os.environ, **CPU_ENVIRONMENT}
    environment = {key: value for key, value in every.items() if gives_back or key not in CPU_MATH}
    done = subprocess.run(  # noqa: S603 - this file, in the interpreter that runs it
        [sys.executable, __file__, "--measure", name], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(name: str, rounds: int) -> dict[str, Any]:
    """Both ways in turns: medians, and the median of the rounds' ratios of CPU time."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(rounds):
        for gives_back in (number % 2 == 0, number % 2 != 0):
            found[gives_back].append(measured(name, gives_back=gives_back))

    def medians(key: str) -> dict[str, float]:
        return {_WAYS[way]: statistics.median(row[key] for row in rows) for way, rows in found.items()}

    pairs = zip(found[True], found[False], strict=True)
    ratios = [one["cpu_seconds"] / other["cpu_seconds"] for one, other in pairs]
    return {
        "micro_batch_size": SIZES[name],
        "cpu_seconds_of_an_update": {way: round(seconds, 5) for way, seconds in medians("cpu_seconds").items()},
        "peak_mib": {way: nbytes / 2**20 for way, nbytes in medians("peak_bytes").items()},
        "cpu_time_ratio": round(statistics.median(ratios), 3),
        "cpu_time_ratios": [round(it, 3) for it in sorted(ratios)],
    }


_WAYS = {True: "gives back", False: "keeps"}


def main() -> None:
    """Run, print a table, add the figures to the file."""
    parser = new_parser(__doc__, "cpu_math_buffers.json")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--label", default=cpu().name)
    parser.add_argument("--measure", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    models = {name: compared(name, options.rounds) for name in options.models}
    print_head("model", "CPU s an update, kept", "given back", "ratio", "peak MiB, kept", "given back")
    for name, row in models.items():
        seconds, peak = row["cpu_seconds_of_an_update"], row["peak_mib"]
        print(
            f"| {name} | {seconds['keeps']:.3f} | {seconds['gives back']:.3f} | {row['cpu_time_ratio']:.2f} "
            f"| {peak['keeps']:.1f} | {peak['gives back']:.1f} |"
        )
    run = measured_here() | {"rounds": options.rounds, "models": models}
    write_result(options.output, read_result(options.output) | {options.label: run})


if __name__ == "__main__":
    main()
