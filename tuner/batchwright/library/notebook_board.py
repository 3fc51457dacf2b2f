"""The progress of a tuning in a notebook: one output, which each step replaces. No torch."""

from __future__ import annotations

from typing import Any

from batchwright.cli.display import probe_table, rows_of
from batchwright.html_view import html_view
from batchwright.schemas.results import ProbeResult


class NotebookBoard:
    """A ``batchwright.driving.foreground.TuningObserver`` that shows a table of the probes in the cell that runs."""

    def __init__(self) -> None:
        self._probes: list[ProbeResult] = []
        self._activity = ""
        self._shown: Any = None

    def __enter__(self) -> NotebookBoard:  # noqa: PYI034 - not meant for subclassing
        """Show the output."""
        from IPython.display import display  # noqa: PLC0415 - a notebook has it

        self._shown = display(self, display_id=True)  # type: ignore[no-untyped-call] # IPython is not typed
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the probes alone."""
        self.set_activity("")

    def set_activity(self, activity: str) -> None:
        """Show what the tuning does now."""
        self._activity = activity
        self._shown.update(self)

    def add(self, probe: ProbeResult) -> None:
        """Show a probe that has ended."""
        self._probes.append(probe)
        self._shown.update(self)

    def _repr_html_(self) -> str:
        now = f", now {self._activity}" if self._activity else ""
        return html_view(f"Probes of real updates{now}", {"probes": rows_of(probe_table(self._probes))})
