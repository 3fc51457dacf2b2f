"""Plots of a run: memory against micro-batch size, and the loss. PNG files and interactive HTML. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.schemas.training import TrainingProgress
from batchwright.system.files import write_atomically

mpl.use("agg")

_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"))
_FIT, _OOM, _LINE = "#2a9d5c", "#d1495b", "#5b6c8f"


@dataclass(frozen=True)
class MemoryLine:
    """Peak memory as a function of the micro-batch size: bytes at zero and bytes per sample."""

    intercept: float
    slope: float

    def at(self, size: float) -> float:
        """Bytes at ``size``."""
        return self.intercept + self.slope * size


def fitted_line(probes: Sequence[ProbeResult]) -> MemoryLine | None:
    """The line through the two largest measured fits; None if there are fewer than two."""
    fits = {probe.micro_batch_size: probe.used_bytes for probe in probes if probe.outcome is Outcome.FIT}
    points = sorted((size, used) for size, used in fits.items() if used)[-2:]
    if len(points) < 2:  # noqa: PLR2004 - two points make a line
        return None
    (low, low_bytes), (high, high_bytes) = points
    slope = (high_bytes - low_bytes) / (high - low)
    return MemoryLine(low_bytes - slope * low, slope)


def _failures(recommendation: Recommendation) -> list[ProbeResult]:
    return [probe for probe in recommendation.evidence.probes if probe.outcome is not Outcome.FIT]


def _fits(recommendation: Recommendation) -> list[ProbeResult]:
    return [probe for probe in recommendation.evidence.probes if probe.outcome is Outcome.FIT and probe.used_bytes]


def _failure_heights(recommendation: Recommendation) -> list[float]:
    """Heights to draw failed probes at: on the fitted line, as they did not reach their peak, or else at the limit."""
    line = fitted_line(recommendation.evidence.probes)
    limit, unit = _limit(recommendation), _unit(recommendation)[0]
    return [(line.at(probe.micro_batch_size) if line else limit) / unit for probe in _failures(recommendation)]


def _unit(recommendation: Recommendation) -> tuple[int, str]:
    """The unit of the memory axis: the largest unit below the limit."""
    return next((unit for unit in _UNITS if _limit(recommendation) >= unit[0]), _UNITS[-1])


def _limit(recommendation: Recommendation) -> float:
    limits = [probe.limit_bytes for probe in recommendation.evidence.probes if probe.limit_bytes]
    return float(limits[0]) if limits else float(recommendation.device.total_bytes)


def _line_points(recommendation: Recommendation) -> tuple[list[float], list[float]]:
    line = fitted_line(recommendation.evidence.probes)
    if line is None:
        return [], []
    largest = max(probe.micro_batch_size for probe in recommendation.evidence.probes)
    fitting = [probe.micro_batch_size for probe in _fits(recommendation)]
    sizes = [0.0, float(min(largest, 1.3 * max(fitting)))]
    return sizes, [line.at(size) / _unit(recommendation)[0] for size in sizes]


def _visible_failures(recommendation: Recommendation) -> list[tuple[int, float, str]]:
    """The failed probes up to twice the largest fitting size, as size, height and outcome."""
    fitting = [probe.micro_batch_size for probe in _fits(recommendation)]
    edge = 2 * max(fitting, default=1)
    pairs = zip(_failures(recommendation), _failure_heights(recommendation), strict=True)
    return [
        (probe.micro_batch_size, height, str(probe.outcome))
        for probe, height in pairs
        if probe.micro_batch_size <= edge
    ]


def plot_memory(recommendation: Recommendation, directory: Path) -> tuple[Path, Path]:
    """Write ``memory.png`` and ``memory.html``: every probe, the fitted line, the limit."""
    return (
        _save_png(_draw_memory(recommendation, _memory_title(recommendation)), directory / "memory.png"),
        _save_html(memory_figure(recommendation), directory / "memory.html"),
    )


def _memory_title(recommendation: Recommendation) -> str:
    largest, device = recommendation.largest_micro_batch_size or "nothing", recommendation.device.id
    return f"Peak memory against micro-batch: {largest} fits on {device}"


def _draw_memory(recommendation: Recommendation, title: str) -> Figure:
    unit, name = _unit(recommendation)
    figure, axes = _axes(title, "micro-batch size (samples)", f"peak memory ({name})")
    sizes, heights = _line_points(recommendation)
    axes.plot(sizes, heights, color=_LINE, linewidth=1, label="affine through the last two fits")
    fits = _fits(recommendation)
    axes.scatter(
        [probe.micro_batch_size for probe in fits],
        [(probe.used_bytes or 0) / unit for probe in fits],
        color=_FIT,
        label="FIT",
        zorder=3,
    )
    failed = _visible_failures(recommendation)
    axes.scatter(
        [size for size, _, _ in failed],
        [height for _, height, _ in failed],
        color=_OOM,
        marker="x",
        label="OOM (height from the fitted line)",
        zorder=3,
    )
    axes.axhline(_limit(recommendation) / unit, color=_OOM, linestyle="--", linewidth=1, label="limit less margin")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def memory_figure(recommendation: Recommendation) -> go.Figure:
    """Build the interactive figure of every probe, the fitted line and the limit."""
    unit, name = _unit(recommendation)
    figure = go.Figure(
        layout=_layout(_memory_title(recommendation), "micro-batch size (samples)", f"peak memory ({name})")
    )
    sizes, heights = _line_points(recommendation)
    figure.add_scatter(x=sizes, y=heights, mode="lines", name="affine fit", line={"color": _LINE})
    fits = _fits(recommendation)
    figure.add_scatter(
        x=[probe.micro_batch_size for probe in fits],
        y=[(probe.used_bytes or 0) / unit for probe in fits],
        customdata=[probe.seconds.total for probe in fits],
        hovertemplate="micro-batch %{x}<br>%{y:.3f} " + name + "<br>%{customdata:.2f} s<extra>FIT</extra>",
        mode="markers",
        name="FIT",
        marker={"color": _FIT, "size": 10},
    )
    failed = _visible_failures(recommendation)
    figure.add_scatter(
        x=[size for size, _, _ in failed],
        y=[height for _, height, _ in failed],
        text=[outcome for _, _, outcome in failed],
        hovertemplate="micro-batch %{x}<br>%{text}<extra></extra>",
        mode="markers",
        name="OOM",
        marker={"color": _OOM, "size": 10, "symbol": "x"},
    )
    limit = _limit(recommendation) / unit
    width = max([*sizes, *(size for size, _, _ in failed), *(probe.micro_batch_size for probe in fits)])
    line = {"color": _OOM, "dash": "dash", "width": 1}
    figure.add_scatter(x=[0, 1.02 * width], y=[limit, limit], mode="lines", name="limit less margin", line=line)
    return figure


def plot_loss(updates: Sequence[TrainingProgress], directory: Path) -> tuple[Path, Path]:
    """Write ``loss.png`` and ``loss.html``: the loss of every update."""
    numbers = [progress.update for progress in updates if progress.loss is not None]
    losses = [progress.loss for progress in updates if progress.loss is not None]
    title = f"Loss over {len(updates)} optimizer updates"
    figure, axes = _axes(title, "optimizer update", "loss")
    axes.plot(numbers, losses, color=_LINE)
    page = go.Figure(layout=_layout(title, "optimizer update", "loss"))
    page.add_scatter(x=numbers, y=losses, mode="lines", line={"color": _LINE}, name="loss")
    return _save_png(figure, directory / "loss.png"), _save_html(page, directory / "loss.html")


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _layout(title: str, x: str, y: str) -> go.Layout:
    return go.Layout(
        title=title, template="simple_white", xaxis={"title": x}, yaxis={"title": y, "rangemode": "tozero"}
    )


def _save_png(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _save_html(figure: go.Figure, path: Path) -> Path:
    """Save one file that contains plotly's script, so that it opens offline."""
    write_atomically(path, figure.to_html(include_plotlyjs=True, default_height="96vh"))
    return path
