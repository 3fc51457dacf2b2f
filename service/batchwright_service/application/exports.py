"""Use cases of exports: stored recommendations as configurations of frameworks and launchers."""

from batchwright.client.documents.exports import ExportFormatList, ExportRequest
from batchwright.exports.base import Export, ExportedFile
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.application import views
from batchwright_service.errors import NotFoundError
from batchwright_service.store.recommendation_queries import RecommendationStore

_FORMATS = ExportFormatList(items=tuple(target.described() for target in TARGETS.values()))


class ExportCases:
    """Use cases of exports. Safe to share between threads."""

    def __init__(self, recommendations: RecommendationStore) -> None:
        self._recommendations = recommendations

    def formats(self) -> ExportFormatList:
        """Return the available formats."""
        return _FORMATS

    def export(self, recommendation_id: str, request: ExportRequest) -> Export:
        """Export a stored recommendation.

        Raises:
            NotFoundError: when no recommendation has this id.
            ExportError: when the format does not support the recommendation or the options.
        """
        views.check_identifier(recommendation_id, "recommendation")
        return exported(self._recommendations.get(recommendation_id), request)

    def file(self, recommendation_id: str, request: ExportRequest, name: str) -> ExportedFile:
        """Return one file of an export.

        Raises:
            NotFoundError: when no recommendation has this id, or its export has no such file.
            ExportError: as ``export``.
        """
        files = {file.name: file for file in self.export(recommendation_id, request).files}
        if name not in files:
            raise NotFoundError(f"the export to {request.format} has no file {name!r}; it has: {', '.join(files)}")
        return files[name]


def exported(recommendation: Recommendation, request: ExportRequest) -> Export:
    """Export a recommendation.

    Raises:
        ExportError: when the format does not support the recommendation or the options.
    """
    return export(recommendation, request.format, version=request.target_version, options=request.options)
