"""The plot of a tuning's memory against the micro-batch size, as an interactive figure. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import Outcome, ProbeResult

_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"))
_FIT, _OOM, _LINE = "#2a9d5c", "#d1495b", "#5b6c8f"


def fitted_line(probes: Sequence[ProbeResult]) -> tuple[float, float] | None:
    """The line through the two largest measured fits, as bytes at size zero and bytes per sample; None of fewer."""
    fits = {probe.micro_batch_size: probe.used_bytes for probe in probes if probe.outcome is Outcome.FIT}
    points = sorted((size, used) for size, used in fits.items() if used)[-2:]
    if len(points) < 2:  # noqa: PLR2004 - two points make a line
        return None
    (low, low_bytes), (high, high_bytes) = points
    slope = (high_bytes - low_bytes) / (high - low)
    return low_bytes - slope * low, slope


def memory_figure(recommendation: Recommendation) -> go.Figure:
    """Build the figure of every probe, the fitted line and the limit.

    Failed probes up to twice the largest fitting size are on the line, as they did not reach their peak, or without a
    line at the limit.
    """
    probes, device = recommendation.evidence.probes, recommendation.device
    limit = next((float(probe.limit_bytes) for probe in probes if probe.limit_bytes), float(device.total_bytes))
    unit, name = next((unit for unit in _UNITS if limit >= unit[0]), _UNITS[-1])
    line = fitted_line(probes)

    def height(size: float) -> float:
        return (limit if line is None else line[0] + line[1] * size) / unit

    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.used_bytes]
    largest = max((probe.micro_batch_size for probe in fits), default=1)
    failed = [probe for probe in probes if probe.outcome is not Outcome.FIT and probe.micro_batch_size <= 2 * largest]
    ends = [0.0, float(min(max(probe.micro_batch_size for probe in probes), 1.3 * largest))] if line else []
    title = (
        f"Peak memory against micro-batch: {recommendation.largest_micro_batch_size or 'nothing'} fits on {device.id}"
    )
    axes = {"xaxis": {"title": "micro-batch size (samples)"}, "yaxis": {"title": f"peak memory ({name})"}}
    figure = go.Figure(layout=go.Layout(title=title, template="simple_white", **axes))
    figure.update_yaxes(rangemode="tozero")
    figure.add_scatter(
        x=ends, y=[height(size) for size in ends], mode="lines", name="affine fit", line={"color": _LINE}
    )
    figure.add_scatter(
        x=[probe.micro_batch_size for probe in fits],
        y=[(probe.used_bytes or 0) / unit for probe in fits],
        customdata=[probe.seconds.total for probe in fits],
        hovertemplate="micro-batch %{x}<br>%{y:.3f} " + name + "<br>%{customdata:.2f} s<extra>FIT</extra>",
        mode="markers",
        name="FIT",
        marker={"color": _FIT, "size": 10},
    )
    figure.add_scatter(
        x=[probe.micro_batch_size for probe in failed],
        y=[height(probe.micro_batch_size) for probe in failed],
        text=[str(probe.outcome) for probe in failed],
        hovertemplate="micro-batch %{x}<br>%{text}<extra></extra>",
        mode="markers",
        name="OOM",
        marker={"color": _OOM, "size": 10, "symbol": "x"},
    )
    width = 1.02 * max([*ends, *(probe.micro_batch_size for probe in (*failed, *fits))])
    style = {"color": _OOM, "dash": "dash", "width": 1}
    figure.add_scatter(x=[0, width], y=[limit / unit] * 2, mode="lines", name="limit less margin", line=style)
    return figure
