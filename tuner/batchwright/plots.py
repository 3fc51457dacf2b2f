"""The plot of a tuning's memory against the micro-batch size: interactive, and as a picture. No torch."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import Outcome, ProbeResult

_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"))
_FIT, _OOM, _LINE = "#2a9d5c", "#d1495b", "#5b6c8f"


_SIZE = 640, 360
"""Pixels of the picture."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 60, 50
"""Its margins in pixels."""


class MemoryFigure(go.Figure):  # type: ignore[misc] # plotly is not typed
    """A figure that brings its picture along, which an exported notebook shows where it runs no script."""

    def _ipython_display_(self) -> None:
        from IPython.display import display  # noqa: PLC0415 - a notebook has it

        display({**self._repr_mimebundle_(), "image/svg+xml": self.to_svg()}, raw=True)  # type: ignore[no-untyped-call] # IPython is not typed

    def to_svg(self) -> str:
        """Draw the lines and points as SVG, without the browser that plotly's own export needs."""
        (width, height), lines = _SIZE, self.data
        right = max((float(x) for line in lines for x in line.x), default=1.0) or 1.0
        top = 1.05 * max((float(y) for line in lines for y in line.y), default=1.0) or 1.0

        def place(x: float, y: float) -> str:
            across = _LEFT + x / right * (width - _LEFT - _RIGHT)
            return f"{across:.1f},{height - _BOTTOM - y / top * (height - _TOP - _BOTTOM):.1f}"

        def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
            return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="currentColor">{escape(words)}</text>'

        drawn = [
            text(width / 2, 20, self.layout.title.text),
            text(width / 2, height - 10, self.layout.xaxis.title.text),
        ]
        drawn.append(text(8, 36, self.layout.yaxis.title.text, "start"))
        drawn += [
            text(_LEFT + share * (width - _LEFT - _RIGHT), height - 30, f"{share * right:.4g}") for share in (0, 0.5, 1)
        ]
        drawn += [
            text(_LEFT - 6, height - _BOTTOM - share * (height - _TOP - _BOTTOM), f"{share * top:.3g}", "end")
            for share in (0, 0.5, 1)
        ]
        for line in lines:
            points = [place(float(x), float(y)) for x, y in zip(line.x, line.y, strict=True)]
            if line.mode == "lines":
                dashes, corners = "6 4" if line.line.dash else "none", " ".join(points)
                style = f'fill="none" stroke="{line.line.color}" stroke-dasharray="{dashes}"'
                drawn.append(f'<polyline points="{corners}" {style}/>')
            else:
                circles = (f'<circle cx="{x}" cy="{y}" r="4"/>' for x, y in (point.split(",") for point in points))
                drawn.append(f'<g fill="{line.marker.color}"><title>{escape(line.name)}</title>{"".join(circles)}</g>')
        frame = (
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="12"'
        )
        return f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>{"".join(drawn)}</svg>'


def fitted_line(probes: Sequence[ProbeResult]) -> tuple[float, float] | None:
    """The line through the two largest measured fits, as bytes at size zero and bytes per sample; None of fewer."""
    fits = {probe.micro_batch_size: probe.used_bytes for probe in probes if probe.outcome is Outcome.FIT}
    points = sorted((size, used) for size, used in fits.items() if used)[-2:]
    if len(points) < 2:  # noqa: PLR2004 - two points make a line
        return None
    (low, low_bytes), (high, high_bytes) = points
    slope = (high_bytes - low_bytes) / (high - low)
    return low_bytes - slope * low, slope


def memory_figure(recommendation: Recommendation) -> MemoryFigure:
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
    figure = MemoryFigure(layout=go.Layout(title=title, template="simple_white", **axes))
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
