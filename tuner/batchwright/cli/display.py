"""Terminal displays: probes as they end, the recommendation, progress of training. Never on standard output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from batchwright.planning.objectives.by_name import objective_of
from batchwright.planning.plan_figures import format_rate
from batchwright.schemas.plans import Plan, UniformPlan, format_sizes
from batchwright.schemas.recommendation import Alternative, Headroom, Recommendation, Timings, WhatIf
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.schemas.training import TrainingProgress
from batchwright.training.launching.run_log import describe_evaluation, describe_skip, describe_split
from batchwright.units import counted, format_bytes

_WIDE = 100
"""Columns of a terminal at which the bar has its full length and the gradient norm is shown."""
_BAR_WIDTH = 40

_STYLES = {Outcome.FIT: "green", Outcome.OOM: "red"}


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints texts as they are: no markup, and no emoji for `:name:`."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def progress_console() -> Console:
    """The console for progress on standard error, so that standard output has only the result."""
    return plain_console(stderr=True)


def probe_row(probe: ProbeResult) -> tuple[str | Text, ...]:
    """A probe as a table row: size, outcome, peak (on CUDA of the reserved memory), seconds, remark."""
    peak = probe.process_peak_bytes if probe.peak_reserved_bytes is None else probe.peak_reserved_bytes
    return (
        f"{probe.micro_batch_size:,}",
        Text(probe.outcome, style=_STYLES.get(probe.outcome, "yellow")),
        format_bytes(peak) if peak else "",
        f"{probe.seconds.total:.2f}",
        Text(_remark(probe), style="dim"),
    )


def _remark(probe: ProbeResult) -> str:
    if probe.counted is not None and probe.outcome is Outcome.FIT:
        return probe.counted.statement
    timing = probe.timing
    timed = [f"timed, {timing.updates} updates"] if timing is not None and probe.measures_time else []
    plan = [f"the plan: {format_sizes(probe.micro_batch_sizes)}"] if probe.runs_plan and not probe.measures_time else []
    remarks = [*timed, *plan]
    if probe.outcome is not Outcome.FIT:
        is_long = len(probe.message) > _LONGEST_MESSAGE
        remarks.append(f"{probe.message[: _LONGEST_MESSAGE - 1]}…" if is_long else probe.message)
    elif probe.peak_reserved_bytes is not None:
        context = "" if probe.context_bytes is None else f", context {format_bytes(probe.context_bytes)} beside it"
        remarks.append(f"reserved; allocated {format_bytes(probe.peak_allocated_bytes or 0)}{context}")
    return "; ".join(remarks)


class ProbeBoard:
    """Live table of the probes of a tuning, with the current activity.

    Without a terminal, a line per probe is printed instead, and one for each step before the first probe.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._probes: list[ProbeResult] = []
        self._activity = ""
        self._live = Live(console=console, refresh_per_second=8, transient=False, get_renderable=self._render)

    def __enter__(self) -> ProbeBoard:  # noqa: PYI034 - not meant for subclassing
        """Start the live display."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw the final table."""
        self._activity = ""
        if self._console.is_terminal:
            self._live.stop()

    def set_activity(self, activity: str) -> None:
        """Set the shown current activity."""
        is_new = activity.partition(":")[0] != self._activity.partition(":")[0]  # not the progress of a step
        self._activity = activity
        if is_new and not self._console.is_terminal and not self._probes:
            self._console.print(f"{activity} ...", soft_wrap=True)

    def add(self, probe: ProbeResult) -> None:
        """Add a probe that has ended."""
        self._probes.append(probe)
        if not self._console.is_terminal:
            size, outcome, peak, seconds, remark = map(str, probe_row(probe))
            cells = (size, outcome, peak, f"{seconds} s", remark)
            self._console.print("probe " + "  ".join(cell for cell in cells if cell), soft_wrap=True)

    def _render(self) -> RenderableType:
        table = probe_table(self._probes)
        return Group(table, Spinner("dots", self._activity)) if self._activity else table


def probe_table(probes: Sequence[ProbeResult]) -> Table:
    """Build the table of probes."""
    table = table_of("micro-batch", "outcome", "peak", "seconds", left=("outcome",))
    table.add_column("", overflow="fold")
    for probe in probes:
        table.add_row(*probe_row(probe))
    return table


_MANY_VARIABLES = 3
"""Variables beside the first from which on only their number is shown."""
_SHORTEST_PART = 0.1
"""Seconds of the shortest part of a tuning that is named."""
_CHANGES = {
    "precision": "{}",
    "activation_checkpointing": "activation checkpointing",
    "optimizer.implementation": "{} optimizer",
    "gradient_gathering": "gradients gathered {}",
}
"""Labels of changes of the spec in the table of what-ifs."""
_LONGEST_MESSAGE = 60
_NO_WHAT_IF = "no change is expected to fit a larger micro-batch, or the plan has no use for one"

_LARGER_NOT_TRIED = "plan around a micro-batch that fits; larger ones were not tried"
_LARGER_NOT_KNOWN = "plan around a micro-batch that fits; larger ones may"


def panel_of(facts: Iterable[tuple[str, RenderableType]], title: str, style: str) -> Panel:
    """Build a panel of named facts, with a title and the style of its border."""
    lines = Table.grid(padding=(0, 2))
    for name, value in facts:
        lines.add_row(Text(name, style="bold"), Text(value) if isinstance(value, str) else value)
    return Panel(lines, title=title, title_align="left", border_style=style)


def table_of(*names: str, left: Container[str] = ()) -> Table:
    """Build a table without lines, whose columns are aligned to the right unless they are among ``left``."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def rows_of(table: RenderableType) -> object:
    """Return the rows of a table by the headers of its columns; texts as they are."""
    if not isinstance(table, Table):
        return table
    columns = {
        str(column.header) or " " * place: [str(cell) for cell in column.cells]  # several have none
        for place, column in enumerate(table.columns, 1)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def recommendation_panel(found: Recommendation) -> Panel:
    """Build the panel of a recommendation."""
    return panel_of(facts_of(found), _title(found), "green" if found.feasible else "red")


def _title(found: Recommendation) -> str:
    if not found.feasible:
        return "nothing fits" if found.largest_micro_batch_size is None else "no plan, though a micro-batch fits"
    proof = found.evidence.proof
    objective = objective_of(found.request)
    if objective.is_of_plans or proof.shows_larger_fail:
        return objective.title
    return _LARGER_NOT_TRIED if proof.stopped_by == "bound" else _LARGER_NOT_KNOWN


def facts_of(found: Recommendation) -> list[tuple[str, RenderableType]]:
    """Return what the panel says of a recommendation: texts, and tables, by names."""
    facts: list[tuple[str, RenderableType]] = []
    names = [name for name in (found.name, found.project) if name is not None]
    if names := [*names, *(f"{key}={value}" for key, value in found.labels.items())]:
        facts.append(("name", ", ".join(names)))
    facts += [("reason", found.infeasible_reason or "")] if found.plan is None else _facts_of_plan(found, found.plan)
    facts.append(("device", f"{found.device.id} ({found.device.name})"))
    facts.append(("proof", found.evidence.proof.statement))
    if found.evidence.data is not None:
        facts.append(("data read", found.evidence.data.in_words))
    if found.evidence.plan_proof and found.evidence.plan_proof != found.infeasible_reason:
        facts.append(("plan proof", found.evidence.plan_proof))
    if found.choice and (
        objective_of(found.request).is_of_plans or found.largest_micro_batch_size != found.evidence.proof.fits
    ):
        facts.append(("choice", found.choice))
    if len(found.alternatives) > 1:
        facts.append(("alternatives", alternatives_table(found.alternatives)))
    if found.request.what_if:
        facts.append(("what if", what_if_table(found.what_ifs) if found.what_ifs else _NO_WHAT_IF))
    if drawn := [probe.counted.longest_first for probe in found.evidence.probes if probe.counted is not None]:
        facts += [("batches", f"Probes drew {drawn[-1]}.")] if drawn[-1] else []
    if imports := _imports_in_words(found.evidence.probes):
        facts.append(("imports", imports))
    times = found.timings
    facts.append(("took", f"{counted(times.probes, 'probe')}, {times.out_of_memory_probes} OOM, {_seconds_of(times)}"))
    if found.environment:
        facts.append(("run with", _variables_in_words(found.environment)))
    facts += [("warning", f"{advice.code}: {advice.message}") for advice in found.warnings]
    return facts


def _variables_in_words(environment: Mapping[str, str]) -> str:
    """The variables that a run has to have; of many the first, since exports and jobs set them all."""
    first, *others = (f"{name}={value}" for name, value in environment.items())
    many = len(others) >= _MANY_VARIABLES
    return f"{first} and {len(others)} more variables, as exports set them" if many else " ".join([first, *others])


def _seconds_of(times: Timings) -> str:
    """The time of a tuning, and of each part that took a tenth of a second: ``24.1 s: 6.2 s in probes, 9.8 s ...``."""
    parts = {
        "in probes": times.probe_seconds,
        "starting": times.start_seconds,
        "reading data": times.data_seconds,
        "checking the loss": times.coupling_check_seconds,
        "waiting for the estimate": times.estimate_seconds,
        "estimating what-ifs": times.what_if_seconds,
    }
    listed = ", ".join(f"{seconds:.1f} s {part}" for part, seconds in parts.items() if seconds >= _SHORTEST_PART)
    return f"{times.total_seconds:.1f} s{f': {listed}' if listed else ''}"


def _imports_in_words(probes: Sequence[ProbeResult]) -> str:
    """The imports that the probes of a command shared, and why others shared none; empty for other probes."""
    shared = [probe.shared_imports for probe in probes if probe.forked and probe.shared_imports is not None]
    alone = [probe.shared_imports.reason for probe in probes if not probe.forked and probe.shared_imports is not None]
    parts = []
    if shared:
        imports = shared[-1]
        end = f", up to {imports.place}" if imports.place else ""
        why = f" ({imports.reason})" if imports.reason else ""
        ran = f"{counted(imports.statements, 'import statement')} ran once for {counted(len(shared), 'probe')}"
        parts.append(f"{ran}{end}{why}{'' if imports.torch else '; torch is not among them'}")
    if alone:
        parts.append(f"{counted(len(alone), 'probe')} imported everything anew: {alone[-1]}")
    return "; ".join(parts)


def alternatives_table(alternatives: Sequence[Alternative]) -> Table:
    """Build the table of plans; ``~`` marks interpolated figures, ``>`` the recommended plan."""
    table = table_of("", "steps", "micro-batch", "peak", "samples/s")
    table.add_column("")
    for plan in alternatives:
        about = "" if plan.source == "measured" else "~"
        table.add_row(
            ">" if plan.chosen else "",
            f"{plan.gradient_accumulation_steps:,}",
            f"{plan.micro_batch_size:,}",
            "" if plan.peak_bytes is None else about + format_bytes(plan.peak_bytes),
            "" if plan.samples_per_second is None else about + format_rate(plan.samples_per_second),
            ", ".join(["timed"] * (plan.timed_updates > 1) + ["thrashes"] * plan.thrashing),
            style="" if plan.chosen else "dim",
        )
    return table


def what_if_table(what_ifs: Sequence[WhatIf]) -> Table:
    """Build the table of what-ifs, with the interval of each size below the size."""
    table = Table(box=None, pad_edge=False, title="estimated, not run", title_justify="left", title_style="italic")
    table.add_column("change", no_wrap=True)
    for name in ("largest", "plan", "peak"):
        table.add_column(name, justify="right")
    for what_if in what_ifs:
        low, size, high = what_if.surely_fits, what_if.largest_micro_batch_size, what_if.may_fit
        plan = what_if.plan
        table.add_row(
            "\n+ ".join(_CHANGES.get(path, path + " {}").format(value) for path, value in what_if.changes.items()),
            f"~{size:,}" + (f"\n{low:,}-{high:,}" if low < high else ""),
            "" if plan is None else f"{plan.gradient_accumulation_steps:,} x \u2264{plan.micro_batch_size:,}",
            f"~{format_bytes(what_if.peak_bytes)}",
        )
    return table


def _facts_of_plan(found: Recommendation, plan: Plan) -> list[tuple[str, str]]:
    shapes = Counter(plan.micro_batch_sizes)
    facts = [
        ("plan" if len(shapes) == 1 else f"plan of {ranks} ranks", f"{format_sizes(sizes)} = {sum(sizes)}")
        for sizes, ranks in shapes.items()
    ]
    is_open = any(warning.code == "samples-not-verified" for warning in found.warnings)
    requested = (
        "not verified" if is_open else "exact" if plan.exact else f"{plan.requested_effective_batch_size} requested"
    )
    size, fits = found.largest_micro_batch_size, found.evidence.proof.fits
    facts += [
        ("accumulation", f"{counted(plan.gradient_accumulation_steps, 'step')} per update and rank"),
        ("effective batch", f"{plan.effective_batch_size}, {requested}"),
        ("largest", f"a micro-batch of {fits} fits{f'; the plan has at most {size}' if size != fits else ''}"),
    ]
    if found.uniform is not None:
        facts.append(("uniform plan", describe_uniform_plan(found.uniform)))
    if found.headroom is not None:
        room = found.headroom
        limit = format_bytes(room.limit_bytes)
        facts.append(("memory", f"{format_bytes(room.peak_bytes)} of {limit}, {room.free_fraction:.1%} free"))
        facts += [("of which", parts)] if (parts := describe_parts(room)) else []
    if found.gain is not None:
        facts.append(("gain", found.gain.statement))
    return facts


def describe_parts(room: Headroom) -> str:
    """Describe what a peak on CUDA consists of; empty on the CPU."""
    if room.reserved_bytes is None:
        return ""
    parts = [f"{format_bytes(room.reserved_bytes)} reserved by the allocator"]
    if room.allocated_bytes is not None:
        parts[0] += f" ({format_bytes(room.allocated_bytes)} allocated)"
    if room.context_bytes is not None:
        parts.append(f"{format_bytes(room.context_bytes)} of the process outside of it")
    return ", ".join(parts)


def describe_uniform_plan(plan: UniformPlan) -> str:
    """Describe a uniform plan in a line or two."""
    product = f"{plan.world_size} ranks x {plan.gradient_accumulation_steps} steps x {plan.micro_batch_size}"
    near = ", ".join(
        f"{batch.effective_batch_size} = {batch.gradient_accumulation_steps} steps x {batch.micro_batch_size}"
        for batch in plan.nearest
    )
    text = f"{product} = {plan.effective_batch_size}. {plan.change}"
    return text + (f" Reachable close by: {near}." if near else "")


def describe_balanced_plan(plan: Plan) -> str:
    """Describe a balanced plan, with a line per group of ranks with equal sizes."""
    lines = [f"{plan.gradient_accumulation_steps} gradient accumulation steps, {plan.effective_batch_size} samples:"]
    for sizes, ranks in Counter(plan.micro_batch_sizes).items():
        lines.append(f"  {ranks} rank{'s' if ranks > 1 else ''}: {format_sizes(sizes)} = {sum(sizes)}")
    return "\n".join(lines)


class TrainingBar:
    """A progress bar with the loss, and a line for each split micro-batch and skipped update.

    Without a terminal, a line for every tenth of the run is printed instead of the bar.
    """

    def __init__(self, console: Console, updates: int) -> None:
        self._console = console
        self._updates = updates
        self._skipping = False
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=_BAR_WIDTH if console.width >= _WIDE else _BAR_WIDTH // 2),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=updates, figures="")

    def __enter__(self) -> TrainingBar:  # noqa: PYI034 - not meant for subclassing
        """Start the progress bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw the final state."""
        self._progress.stop()

    def show(self, update: TrainingProgress) -> None:
        """Show an update that has been made."""
        lines = [describe_split(split) for split in update.splits]
        lines += [line for evaluation in update.evaluations for line in describe_evaluation(evaluation)]
        if update.skipped and not self._skipping:  # the first of several in a row is enough
            lines.append(f"update {update.update} skipped: {describe_skip(update)}")
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)
        self._skipping = update.skipped
        figures = describe_update(update, norm=not self._console.is_terminal or self._console.width >= _WIDE)
        self._progress.update(self._task, completed=update.update, figures=figures)
        every = max(1, self._updates // 10)
        if not self._console.is_terminal and (update.update % every == 0 or update.update in (1, self._updates)):
            sizes = format_sizes(update.micro_batch_sizes)
            self._console.print(f"update {update.update}/{self._updates}  {figures}  ({sizes})", soft_wrap=True)


def describe_update(update: TrainingProgress, *, norm: bool) -> str:
    """Format loss, gradient norm (if ``norm``) and throughput, in tokens where the loss is weighted by tokens."""
    parts = ["loss not finite" if update.loss is None else f"loss {update.loss:.4f}"]
    if update.skipped:
        parts.append("skipped")
    elif norm and update.gradient_norm is not None:
        parts.append(f"norm {update.gradient_norm:.3g}")
    tokens = update.tokens_per_second
    parts.append(f"{update.samples_per_second:,.0f} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s")
    return "  ".join(parts)
