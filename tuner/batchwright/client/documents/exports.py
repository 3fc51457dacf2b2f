"""Documents of exports: requests, and the available formats. Pure data."""

from batchwright.exports.base import ExportFormat, ExportOptions
from batchwright.schemas.base import Document


class ExportRequest(Document):
    """The target and the options of an export."""

    format: str
    """Name of the target, as listed by `GET /v1/exports`."""
    target_version: str | None = None
    """Version of the target. Default: its newest."""
    options: ExportOptions = ExportOptions()
    """Options about the environment of the run, which the recommendation does not contain."""


class ExportFormatList(Document):
    """Formats that recommendations can be exported to."""

    items: tuple[ExportFormat, ...]
    """Formats of frameworks, then those of launchers."""
