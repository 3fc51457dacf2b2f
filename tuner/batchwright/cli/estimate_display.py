"""Terminal displays of estimates and of the GPU catalogue."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchwright.cli.display import describe_balanced_plan, panel_of, table_of
from batchwright.schemas.estimates import (
    Engine,
    Estimate,
    EstimateRequest,
    GpuEstimate,
    PeakBreakdown,
    PeakEstimate,
    Verdict,
)
from batchwright.schemas.gpus import Gpu
from batchwright.schemas.plans import Plan, format_sizes
from batchwright.units import counted, format_bytes

_STYLES = {Verdict.FITS: "green", Verdict.UNCERTAIN: "yellow", Verdict.DOES_NOT_FIT: "red"}
_WORDS = {Verdict.FITS: "fits", Verdict.UNCERTAIN: "may fit", Verdict.DOES_NOT_FIT: "does not fit"}


def requested_verdict(found: GpuEstimate, request: EstimateRequest) -> Verdict:
    """The verdict of the requested micro-batch size, or of any size when none was requested."""
    return found.feasible if request.micro_batch_size is None or found.peak is None else found.peak.verdict


def estimate_panel(found: Estimate, request: EstimateRequest) -> Panel:
    """Build the panel of an estimate for one GPU."""
    (gpu,) = found.gpus
    verdict = requested_verdict(gpu, request)
    return panel_of(_facts(found, gpu, request), _title(verdict, request, found.engine), _STYLES[verdict])


def _title(verdict: Verdict, request: EstimateRequest, engine: Engine) -> str:
    name = "estimate" if engine == "trace" else "estimate on a virtual card"
    if request.micro_batch_size is None and verdict is Verdict.DOES_NOT_FIT:
        return f"{name}: nothing fits"
    subject = "" if request.micro_batch_size is None else f"a micro-batch of {request.micro_batch_size:,} "
    doubt = ", run `tune` to measure" if verdict is Verdict.UNCERTAIN else ""
    return f"{name}: {subject}{_WORDS[verdict]}{doubt}"


def _facts(found: Estimate, gpu: GpuEstimate, request: EstimateRequest) -> list[tuple[str, RenderableType]]:
    usable = f"{format_bytes(gpu.usable_bytes)} usable, a margin of {request.memory_margin:.0%} left free"
    facts: list[tuple[str, RenderableType]] = [("gpu", f"{gpu.gpu}: {usable}"), ("largest", _describe_largest(gpu))]
    if gpu.peak is not None:
        peak, interval = gpu.peak, gpu.peak.device_bytes
        needed = f"{format_bytes(interval.expected)} needed on the card"
        bounds = f"{format_bytes(interval.low)} to {format_bytes(interval.high)}"
        # from the least with which it succeeds to the most that it takes if it can
        reserved = " to ".join(dict.fromkeys(map(format_bytes, (peak.capacity_bytes, peak.reserved_bytes))))
        facts += [
            (f"at size {peak.micro_batch_size:,}", f"{needed} ({bounds})"),
            ("allocator", f"{reserved} reserved, {format_bytes(peak.allocated_bytes)} allocated"),
        ]
        if gpu.peak.breakdown is not None:
            facts.append(("parts", breakdown_table(gpu.peak, gpu.peak.breakdown)))
    if gpu.plan is not None:
        facts.append(("plan", describe_balanced_plan(gpu.plan)))
    facts.append(("traced" if found.engine == "trace" else "ran", _describe_tracing(found)))
    return facts + [("note", note) for note in (*gpu.notes, *found.notes)]


def _describe_largest(gpu: GpuEstimate) -> str:
    if gpu.peak is None:
        return "not known"
    if gpu.may_fit is None or gpu.surely_fits is None:
        largest = f"micro-batch of {gpu.largest_micro_batch_size:,}" if gpu.largest_micro_batch_size else "none"
        return f"{largest} ran on the virtual card, in {counted(gpu.probes, 'probe')}"
    if not gpu.may_fit:
        return "no micro-batch is expected to fit, not even 1 sample"
    expected = f"micro-batch of {gpu.largest_micro_batch_size:,}" if gpu.largest_micro_batch_size else "none"
    return f"{expected} expected to fit; at least {gpu.surely_fits:,}, at most {gpu.may_fit:,}"


def breakdown_table(peak: PeakEstimate, breakdown: PeakBreakdown) -> Table:
    """Build the table of the parts of the needed memory, with the share of each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    needed = peak.device_bytes.expected
    named = [(name.removesuffix("_bytes").replace("_", " "), nbytes) for name, nbytes in breakdown]
    named.append(("outside allocator", peak.outside_allocator_bytes.expected))
    named.append(("gaps between blocks", max(0, needed - sum(nbytes for _, nbytes in named))))
    for name, nbytes in named:
        table.add_row(name, format_bytes(nbytes), f"{nbytes / max(1, needed):.0%}")
    return table


def _describe_tracing(found: Estimate) -> str:
    kernels = "CUDA's kernels traced" if found.decisions == "cuda" else "the CPU's kernels traced"
    if found.engine == "virtual":
        kernels = f"{counted(sum(gpu.probes for gpu in found.gpus), 'probe')} on virtual cards"
    versions = ", ".join(
        f"{name} {found.versions[name]}" for name in ("torch", "transformers") if name in found.versions
    )
    return f"{found.parameters:,} parameters, {kernels}, {versions}, {found.seconds:.1f} s"


def estimate_table(found: Estimate, request: EstimateRequest) -> Group:
    """Build the table of GPUs, with the verdict and the plan of each."""
    table = Table(box=None, pad_edge=False)
    size = "needs" if request.micro_batch_size is None else f"{request.micro_batch_size:,} needs"
    names = ["gpu", "usable", size, "", "largest", "interval" if found.engine == "trace" else "probes"]
    for name in names if request.effective_batch_size is None else [*names, "plan"]:
        justify: Literal["left", "right"] = "left" if name in {"gpu", "", "plan"} else "right"
        table.add_column(name, justify=justify, no_wrap=name != "plan", overflow="fold")
    for gpu in found.gpus:
        table.add_row(*_row(gpu, request))
    return Group(table, *[Text(line, style="dim") for line in ("", *_remarks(found))])


def _row(gpu: GpuEstimate, request: EstimateRequest) -> list[str | Text]:
    verdict = requested_verdict(gpu, request)
    if gpu.may_fit is None or gpu.surely_fits is None:  # from a virtual card
        certainty = f"{gpu.probes:,}"
    else:
        certainty = f"{gpu.surely_fits:,}-{gpu.may_fit:,}" if gpu.may_fit else "-"
    row: list[str | Text] = [
        gpu.gpu,
        format_bytes(gpu.usable_bytes),
        "" if gpu.peak is None else format_bytes(gpu.peak.device_bytes.expected),
        Text(_WORDS[verdict], style=_STYLES[verdict]),
        f"{gpu.largest_micro_batch_size:,}" if gpu.largest_micro_batch_size else "-",
        certainty,
    ]
    return row if request.effective_batch_size is None else [*row, "" if gpu.plan is None else _format_plan(gpu.plan)]


def _format_plan(plan: Plan) -> str:
    """Format a plan as ``34 + 33 + 33``, or per group of ranks when there are several."""
    if plan.world_size == 1:
        return format_sizes(plan.micro_batch_sizes[0])
    shapes = Counter(plan.micro_batch_sizes)
    return "; ".join(f"{ranks} x ({format_sizes(sizes)})" for sizes, ranks in shapes.items())


def _remarks(found: Estimate) -> list[str]:
    """Notes of all cards once, notes of some cards with their names, and the facts of the tracing."""
    cards: dict[str, list[str]] = {}
    for gpu in found.gpus:
        for note in gpu.notes:
            cards.setdefault(note, []).append(gpu.gpu)
    remarks = [
        note if len(names) == len(found.gpus) else f"{', '.join(names)}: {note}" for note, names in cards.items()
    ]
    outside = {gpu.peak.outside_allocator_bytes.expected for gpu in found.gpus if gpu.peak is not None}
    if outside:
        figures = " to ".join(map(format_bytes, sorted({min(outside), max(outside)})))
        remarks.append(f"The needs include {figures} of the process outside torch's allocator.")
    return [*dict.fromkeys((*remarks, *found.notes)), _describe_tracing(found)]


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """Build the table of the catalogue; ``~`` marks memory that is derived, not reported by torch."""
    table = table_of("name", "sold with", "torch finds", "capability", "other names", left={"name", "other names"})
    for gpu in gpus:
        major, minor = gpu.compute_capability
        about = "" if gpu.evidence == "reported" else "~"
        memory = about + format_bytes(gpu.total_bytes)
        table.add_row(gpu.name, gpu.marketed_memory, memory, f"{major}.{minor}", ", ".join(gpu.aliases))
    return table


def estimate_display(found: Estimate, request: EstimateRequest) -> RenderableType:
    """Build the display of an estimate: a panel for one GPU, a table for several."""
    return estimate_panel(found, request) if len(found.gpus) == 1 else estimate_table(found, request)


def fits_nowhere(found: Estimate, request: EstimateRequest) -> bool:
    """Return whether the requested micro-batch, or any, fits on none of the GPUs."""
    return all(requested_verdict(gpu, request) is Verdict.DOES_NOT_FIT for gpu in found.gpus)
