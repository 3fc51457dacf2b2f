"""Documents of exports: what is asked for, and the formats there are. Pure data."""

from __future__ import annotations

from tuner.exports.base import ExportFormat, ExportOptions
from tuner.schemas.base import Document


class ExportRequest(Document):
    """What to export a recommendation to."""

    format: str
    """The target's name, as `GET /v1/exports` lists them."""
    target_version: str | None = None
    """One of its versions; its newest when absent."""
    options: ExportOptions = ExportOptions()
    """What the recommendation does not know of the place where it will run."""


class ExportFormatList(Document):
    """What recommendations can be exported to."""

    items: tuple[ExportFormat, ...]
    """Frameworks, then launchers."""
