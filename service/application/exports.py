"""Stored recommendations in the words of frameworks and launchers."""

from __future__ import annotations

from service.application import views
from service.application.context import ApplicationContext
from service.domain.exports import ExportFormatList, ExportRequest
from service.errors import NotFoundError
from tuner.exports.base import Export, ExportedFile
from tuner.exports.registry import TARGETS, export
from tuner.schemas.recommendation import Recommendation

_FORMATS = ExportFormatList(items=tuple(target.described() for target in TARGETS.values()))


class ExportCases:
    """What callers can do with exports. Safe to share between threads."""

    def __init__(self, context: ApplicationContext) -> None:
        self._store = context.store

    def formats(self) -> ExportFormatList:
        """What recommendations can be exported to."""
        return _FORMATS

    def export(self, recommendation_id: str, request: ExportRequest) -> Export:
        """A stored recommendation as an export.

        Raises:
            NotFoundError: when there is no such recommendation.
            ExportError: when it cannot be exported like that.
        """
        views.check_identifier(recommendation_id, "recommendation")
        return exported(self._store.recommendation(recommendation_id), request)

    def file(self, recommendation_id: str, request: ExportRequest, name: str) -> ExportedFile:
        """One file of an export.

        Raises:
            NotFoundError: when there is no such recommendation, or no such file in its export.
            ExportError: as ``export``.
        """
        files = {file.name: file for file in self.export(recommendation_id, request).files}
        if name not in files:
            raise NotFoundError(f"the export to {request.format} has no file {name!r}; it has: {', '.join(files)}")
        return files[name]


def exported(recommendation: Recommendation, request: ExportRequest) -> Export:
    """A recommendation as an export.

    Raises:
        ExportError: when it cannot be exported like that.
    """
    return export(recommendation, request.format, version=request.target_version, options=request.options)
