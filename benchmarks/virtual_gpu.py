"""Compare the two engines of `batchwright estimate`: the trace, and torch's CUDA build on virtual cards.

make virtual-gpu-bench, or in its environment
python benchmarks/virtual_gpu.py [--only NAME ...] [--no-largest] [--output benchmarks/results/virtual_gpu.json]

Each workload of virtual_gpu_workloads.py runs two updates at a fixed size on a virtual card, as a probe does. The trace
follows the same update, and a replay with the same settings gives its peaks. Where a workload names an effective batch,
both engines also search the largest size. An error is the trace's, relative to the virtual card: above zero the trace
is higher. Nothing here is measured on a GPU: cuDNN's workspaces for convolutions are zero on a virtual card, and the
trace's assumption of them is left out of neither side.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median, quantiles
from typing import Any

from reporting import HERE, let_probes_import, measured_here, new_parser, print_row, write_result
from virtual_gpu_workloads import EXPANDABLE, EXPLANATIONS, SEARCH_EXPLANATIONS, Case, cases

from batchwright.driving.virtual_estimate import estimate_on_virtual_cards, virtual_supervisor
from batchwright.errors import WorkloadError
from batchwright.estimation.client import estimate
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.estimates import EstimateRequest
from batchwright.schemas.results import Outcome
from batchwright.virtual_gpu.description import VirtualGpu

EXPLAINED_ABOVE = 0.01
Row = dict[str, Any]


def on_virtual_card(case: Case, runner: ProbeSupervisor) -> Row:
    """Return the peaks of the workload's updates on the virtual card."""
    result = runner.run(case.probe)
    if result.outcome is not Outcome.FIT:
        return {"failed": f"{result.outcome}: {result.message}"}
    return {
        "allocated_bytes": result.peak_allocated_bytes,
        "reserved_bytes": result.peak_reserved_bytes,
        "window": result.micro_batch_sizes,
        "seconds": round(result.seconds.total, 1),
    }


def _host(case: Case) -> tuple[str, str]:
    return case.card, case.allocator


def on_virtual_cards(wanted: Sequence[Case]) -> Iterator[Row]:
    """Yield the peaks of each workload; neighbours on one card with one setting share its fork server."""
    for (card, allocator), together in groupby(wanted, key=_host):
        with virtual_supervisor(VirtualGpu.of(card), allocator) as runner:
            for case in together:
                yield on_virtual_card(case, runner)


def traced(wanted: Sequence[Case]) -> Iterator[Row]:
    """Yield what the trace says of each workload, from one process that traces in forks."""
    command = [sys.executable, str(HERE / "virtual_gpu_traced.py"), *(case.name for case in wanted)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603 - our own
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise WorkloadError(f"the process that traces ended with exit status {process.returncode}")


def largest(case: Case) -> Row:
    """Return the largest size by both engines, with their seconds."""
    request = EstimateRequest(
        spec=case.spec,
        gpus=(case.card,),
        effective_batch_size=case.effective_batch_size,
        allocator="expandable-segments" if case.allocator == EXPANDABLE else "default",
        timeout_seconds=600.0,
    )
    found: Row = {}
    for name, engine in (("trace", estimate), ("virtual", estimate_on_virtual_cards)):
        answer = engine(request)
        card = answer.gpus[0]
        found[name] = {"largest": card.largest_micro_batch_size, "seconds": round(answer.seconds, 1)}
        if name == "virtual":
            found[name]["probes"] = card.probes
    return found


def compared(wanted: Sequence[Case]) -> Iterator[Row]:
    """Yield a row for each workload; those on one host are together."""
    ordered = sorted(wanted, key=_host)
    for case, one, other in zip(ordered, traced(ordered), on_virtual_cards(ordered), strict=True):
        row: Row = {"name": case.name, "group": case.group, "card": case.card, "allocator": case.allocator}
        row |= {"size": case.size, "trace": one, "virtual": other}
        if "failed" not in one | other:
            kinds = ("allocated", "reserved")
            row["errors"] = {it: round(one[f"{it}_bytes"] / other[f"{it}_bytes"] - 1, 5) for it in kinds}
        if case.name in EXPLANATIONS:
            row["explanation"] = EXPLANATIONS[case.name]
        errors = row.get("errors", {})
        shown = [f"{100 * errors[it]:+.2f} %" if errors else "failed" for it in ("allocated", "reserved")]
        print_row(row["name"], row["card"], *shown, row.get("explanation", ""))
        yield row


def searched(wanted: Sequence[Case]) -> Iterator[tuple[str, Row]]:
    """Yield the largest sizes of the workloads that name an effective batch, with their names."""
    for case in wanted:
        if case.effective_batch_size is not None:
            found = largest(case)
            print_row(case.name, case.card, *(it["largest"] for it in found.values()))
            if case.name in SEARCH_EXPLANATIONS:
                found["explanation"] = SEARCH_EXPLANATIONS[case.name]
            yield case.name, found


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the sizes of the errors by group, without their signs."""
    groups = ["all", *dict.fromkeys(row["group"] for row in rows)]
    return {group: _summary([row for row in rows if group in ("all", row["group"])]) for group in groups}


def _summary(rows: Sequence[Row]) -> Row:
    found: Row = {"workloads": len(rows)}
    for kind in ("allocated", "reserved"):
        errors = sorted(abs(row["errors"][kind]) for row in rows if "errors" in row)
        if errors:
            ninetieth = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
            found[kind] = {"median": median(errors), "90th percentile": round(ninetieth, 5), "largest": errors[-1]}
    searched = [row["search"] for row in rows if "search" in row]
    found["searched"] = len(searched)
    found["same largest size"] = sum(it["trace"]["largest"] == it["virtual"]["largest"] for it in searched)
    return found


def unexplained(rows: Sequence[Row]) -> list[str]:
    """Return the workloads with a difference above one percent and no explanation."""
    return [
        row["name"]
        for row in rows
        if "explanation" not in row
        and any(abs(error) > EXPLAINED_ABOVE for error in row.get("errors", {"failed": 1.0}).values())
    ]


def main() -> None:
    """Compare, print a table, and write the results."""
    parser = new_parser(__doc__, "virtual_gpu.json")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--no-largest", action="store_true", help="compare peaks alone")
    options = parser.parse_args()
    wanted = [case for case in cases() if options.only is None or case.name in options.only]
    let_probes_import()
    began = time.monotonic()
    rows: list[Row] = []

    def write() -> None:
        found: Row = {"virtual": True, "measured_on_a_gpu": False, "seconds": round(time.monotonic() - began)}
        found |= {"summary": summary(rows), "unexplained": unexplained(rows), "rows": rows}
        write_result(options.output, measured_here() | found)

    for row in compared(wanted):
        rows.append(row)
        write()
    for name, search in () if options.no_largest else searched(wanted):
        next(row for row in rows if row["name"] == name)["search"] = search
        write()
    print(json.dumps(summary(rows), indent=1))
    print(f"not explained: {unexplained(rows) or 'none'}")


if __name__ == "__main__":
    main()
