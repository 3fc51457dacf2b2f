"""How `torch.compile` changes the memory of an update, on virtual cards. Nothing here is measured on a GPU.

python benchmarks/compiled_models.py [--only NAME ...], in the environment that `make virtual-gpu-bench` makes

Workloads of virtual_gpu_workloads.py run two updates at a fixed size on their virtual card, as a probe does: as they
are, compiled with an empty cache of compiled code, and compiled again with what that run left there. A ratio is that of
the compiled peak to the uncompiled one. New kernels are also timed on the card, which fills and empties the
allocator's cache in between, so that the two compiled runs reserve different memory.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from reporting import let_probes_import, measured_here, new_parser, print_row, write_result
from virtual_gpu import on_virtual_card
from virtual_gpu_workloads import Case, cases

from batchwright.driving.virtual_estimate import virtual_supervisor
from batchwright.virtual_gpu.description import VirtualGpu

WORKLOADS = (
    *("GPT-2, bf16-mixed", "GPT-2, fp32", "GPT-2, bf16-mixed, recomputed", "Llama, bf16-mixed"),
    *("Llama, bf16, recomputed", "Qwen3, bf16-mixed", "Gemma 2, bf16-mixed", "Mixtral, bf16-mixed"),
    *("BERT, bf16-mixed", "DeBERTa, fp32", "T5, bf16-mixed", "Whisper, bf16-mixed", "ViT, bf16-mixed"),
    *("ResNet-18, fp32", "ResNet-18, bf16-mixed", "ResNet-50, bf16-mixed", "ConvNeXt, fp32", "LSTM, fp32", "MLP, fp32"),
)
Row = dict[str, Any]


def measured(case: Case) -> Row:
    """Return the peaks of a workload in its three runs, with the ratios."""
    compiled = replace(case, spec=case.spec.model_copy(update={"compile": True}))
    row: Row = {"name": case.name, "card": case.card, "size": case.size}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name, run in (("uncompiled", case), ("empty cache", compiled), ("full cache", compiled)):
            with virtual_supervisor(VirtualGpu.of(case.card), case.allocator) as runner:
                row[name] = on_virtual_card(run, runner)
    for name in ("empty cache", "full cache"):
        if "failed" not in row["uncompiled"] | row[name]:
            for kind in ("allocated", "reserved"):
                row[name][kind] = round(row[name][f"{kind}_bytes"] / row["uncompiled"][f"{kind}_bytes"], 4)
    return row


def ratios(rows: list[Row], kind: str) -> Iterator[float]:
    """Yield the ratios of all compiled runs."""
    for row in rows:
        yield from (row[name][kind] for name in ("empty cache", "full cache") if kind in row[name])


def main() -> None:
    """Run, print a table, and write the results."""
    parser = new_parser(__doc__, "compiled_models.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=WORKLOADS)
    options = parser.parse_args()
    let_probes_import()
    rows: list[Row] = []
    for case in cases():
        if case.name not in options.only:
            continue
        rows.append(measured(case))
        runs = (rows[-1]["empty cache"], rows[-1]["full cache"])
        shown = (run.get(kind, "failed") for kind in ("allocated", "reserved") for run in runs)
        print_row(case.name, case.card, *shown)
        summary = {
            kind: {"smallest": min(found), "median": median(found), "largest": max(found)}
            for kind in ("allocated", "reserved")
            if (found := list(ratios(rows, kind)))
        }
        document = {"virtual": True, "measured_on_a_gpu": False, "summary": summary, "rows": rows}
        write_result(options.output, measured_here() | document)


if __name__ == "__main__":
    main()
