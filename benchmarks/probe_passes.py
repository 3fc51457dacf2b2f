"""Which pass of a probe raises its peak last: forward and backward of each micro-batch, step, second update.

python benchmarks/probe_passes.py [--only NAME ...] [--label TEXT] [--output benchmarks/results/probe_passes.json]
python -m batchwright.virtual_gpu --gpu H100-80GB -- python benchmarks/probe_passes.py --device cuda:0

Each workload makes the two updates of a probe in a process of its own, and the peak since the start is read after each
pass. On the CPU (the workloads of ``finders.py``, each at two thirds of the size that its budget is set for, and every
optimizer on one of them) it is the private memory, on a virtual card (the workloads of ``virtual_gpu.py``) what the
allocator holds in tensors and what it reserves. ``--label`` names the rows of a run in the file.
"""

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import finders_workloads
import virtual_gpu_workloads
from reporting import measured_here, new_parser, print_head, print_row, read_result, write_result
from torch import nn

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.hardware.inventory import find_device
from batchwright.planning.accumulation import probe_window
from batchwright.schemas.optimizer import OPTIMIZERS
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.workload import parse_spec

Row = dict[str, Any]
Peaks = dict[str, int]


_NEEDED = {"muon": {"momentum": 0.95}}
"""Fields of a spec that an optimizer requires."""


def requests(device: str) -> Iterator[tuple[str, ProbeRequest]]:
    """Yield the probes, with their names."""
    if device != "cpu":
        yield from ((case.name, case.probe) for case in virtual_gpu_workloads.cases() if not case.allocator)
        return
    for case in finders_workloads.cases(find_device(device)):
        size = (case.size or 0) * 2 // 3
        for optimizer in OPTIMIZERS if case.name == "GPT-2" else ("adamw",):
            spec = case.request.workload.model_dump(mode="json") | {
                "optimizer": {"name": optimizer, **_NEEDED.get(optimizer, {})}
            }
            name = case.name if optimizer == "adamw" else f"{case.name}, {optimizer}"
            yield (
                name,
                ProbeRequest(
                    spec=parse_spec(spec),
                    micro_batch_size=size,
                    samples_per_window=case.request.effective_batch_size,
                    device=device,
                    limit_bytes=finders_workloads.ROOMY_BYTES,
                    timeout_seconds=600.0,
                ),
            )


def measure(request: ProbeRequest) -> Row:
    """In a process of its own: the peaks after each pass."""
    from batchwright.hardware.memory_devices.factory import open_device  # noqa: PLC0415 - the parent opens no device
    from batchwright.training.accumulation.collectives import Ranks  # noqa: PLC0415
    from batchwright.training.micro_batches.splitting import sliced  # noqa: PLC0415
    from batchwright.training.update_engine import UpdateEngine  # noqa: PLC0415
    from batchwright.workloads.base import Batch, LossTerms  # noqa: PLC0415
    from batchwright.workloads.build import build_model, build_workload  # noqa: PLC0415

    device = open_device(request.device)
    if request.limit_bytes is not None:
        device.limit(request.limit_bytes)
    spec, workload = request.workload, build_workload(request.workload)
    model = build_model(spec, workload, worst_case=True).to(device.torch_device)
    marks: list[tuple[str, Peaks]] = []

    def mark(name: str) -> None:
        device.synchronize()
        found = device.peaks()
        peaks = {"private": found.process_bytes, "allocated": found.allocated_bytes, "reserved": found.reserved_bytes}
        marks.append((name, {kind: it for kind, it in peaks.items() if it is not None}))

    class Marked(UpdateEngine):
        number = 0

        def _loss(self, model: nn.Module, batch: Batch) -> LossTerms:
            if self.number:
                mark(f"backward {self.number}")
            self.number += 1
            terms = super()._loss(model, batch)
            mark(f"forward {self.number}")
            return terms

    engine = Marked(spec, workload, model, device, ranks=Ranks(), recovers=False)
    micro_batches = [sliced(workload.make_batch(size), size) for size in probe_window(request)]
    engine.optimizer.register_step_pre_hook(lambda *_: mark(f"backward {engine.number}"))
    mark("build")
    for update in (1, 2):
        engine.number = 0
        engine.update(micro_batches)
        mark(f"update {update}")
    return {"size": request.micro_batch_size, "passes": [_numbered(index, marks) for index in range(len(marks))]}


def _numbered(index: int, marks: Sequence[tuple[str, Peaks]]) -> Row:
    name, peaks = marks[index]
    in_second = any(it == "update 1" for it, _ in marks[:index])
    step = {"update 1": "step", "update 2": "step"}.get(name, name)
    return {"pass": f"{step} of update 2" if in_second else step, **peaks}


def summary(passes: Sequence[Row], kind: str) -> Row:
    """Return the peak, the first pass after which it is the last, and its shares after one micro-batch and update."""
    peaks = {str(row["pass"]): row[kind] for row in passes}
    final = list(peaks.values())[-1]
    return {
        "peak_bytes": final,
        "last_rise": next(name for name, peak in peaks.items() if peak == final),
        "share_after_micro_batch": round(peaks["backward 1"] / final, 4),
        "share_after_update": round(peaks["step"] / final, 4),
    }


def _attempt(request: ProbeRequest) -> Row:
    try:
        return measure(request)
    except Exception as error:  # noqa: BLE001 - the table says so
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def in_own_process(work: Callable[[ProbeRequest], Row], request: ProbeRequest) -> Row:
    """Return what a fork of this process finds: with torch imported, and no device opened."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, (request,))


def main() -> None:
    """Measure, print a table, add the rows to the file."""
    parser = new_parser(__doc__, "probe_passes.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--label", default=None)
    options = parser.parse_args()
    if options.device == "cpu" and any(os.environ.get(name) != value for name, value in CPU_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **CPU_ENVIRONMENT})  # noqa: S606 - the C library reads them when a process starts
    import transformers.models  # noqa: F401, PLC0415

    import batchwright.probing.child.worker  # noqa: F401, PLC0415 - torch, for all forks

    kinds = ("private",) if options.device == "cpu" else ("allocated", "reserved")
    print_head("workload", *(f"{kind}: last rise, after a micro-batch, after an update" for kind in kinds))
    rows: dict[str, Row] = {}
    for name, request in requests(options.device):
        if options.only is not None and name not in options.only:
            continue
        found = in_own_process(_attempt, request)
        rows[name] = found if "failed" in found else {kind: summary(found["passes"], kind) for kind in kinds}
        cells = (list(rows[name].get(kind, found).values())[-3:] for kind in kinds)
        print_row(name, *(", ".join(map(str, cell)) for cell in cells))
    for kind in kinds:
        print(f"{kind}: {dict(Counter(row[kind]['last_rise'] for row in rows.values() if kind in row))}")
    label = options.label or find_device(options.device).name
    write_result(options.output, read_result(options.output) | {label: measured_here(device=label) | {"rows": rows}})


if __name__ == "__main__":
    main()
