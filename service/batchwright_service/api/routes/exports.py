"""The routes of `/v1/exports` and of the exports of a recommendation."""

from dataclasses import dataclass
from http import HTTPStatus
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Response
from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.exports import ExportFormatList, ExportRequest
from batchwright.exports.base import Export, ExportOptions
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import IfNoneMatch, RecommendationId
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from batchwright_service.api.problems import declared
from batchwright_service.api.responses import Responses, links, on_success
from batchwright_service.api.strict_route import strict_router

router = strict_router("exports", "/v1", Scope.TUNINGS_READ)

_REFUSED = declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
_TEXT: Responses = {
    200: {
        "description": "The content of the file, ready to be written or piped.",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": "#!/bin/bash\n"}},
    }
}
_REVALIDATE = {"Cache-Control": "private, no-cache"}
"""An export changes with the version of the service, so that caches must revalidate."""


_Format = Annotated[str, Path(description="Name of the export format.", examples=["deepspeed"])]
_NEWEST = Query(max_length=100, description="Version of the target; the newest when omitted.")
_VERSION = Annotated[str | None, WithJsonSchema({"type": "string", "maxLength": 100}), _NEWEST]


_OPTIONS: dict[str, Any] = ExportOptions.model_json_schema()["properties"]
_OF_FIELD = {"default", "description", "title"}


@dataclass(frozen=True)
class _ExportParameters:
    target_version: str | None
    options: ExportOptions

    def for_format(self, name: str) -> ExportRequest:
        return ExportRequest(format=name, target_version=self.target_version, options=self.options)


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """Return the query parameter of an option; `null` cannot be written in a query, so that its schema is left out."""
    found = _OPTIONS[name]
    schema = {key: value for key, value in found.get("anyOf", [found])[0].items() if key not in _OF_FIELD}
    query = Query(description=" ".join((field.description or "").split()))
    given: Any = field.annotation
    kind = Annotated[given, *field.metadata, WithJsonSchema(schema), query]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def _export_parameters(*, target_version: str | None, **options: Any) -> _ExportParameters:  # noqa: ANN401 - options
    return _ExportParameters(target_version, ExportOptions(**options))


vars(_export_parameters)["__signature__"] = Signature(
    [
        Parameter("target_version", Parameter.KEYWORD_ONLY, default=None, annotation=_VERSION),
        *(_parameter(name, field) for name, field in ExportOptions.model_fields.items()),
    ]
)
_Parameters = Annotated[_ExportParameters, Depends(_export_parameters)]


@router.get("/exports", summary="List export formats")
async def list_export_formats(context: Context) -> ExportFormatList:
    """List the formats: frameworks, which take the batch sizes, and launchers, which take the topology."""
    return context.exports.formats()


@router.get(
    "/recommendations/{recommendation_id}/exports/{format}",
    summary="Export a recommendation",
    response_model=Export,
    responses=on_success(
        headers=TAG_HEADERS,
        links=links("recommendation_id", "recommendation_id", "getRecommendation"),
    )
    | NOT_MODIFIED
    | _REFUSED,
)
def export_recommendation(
    recommendation_id: RecommendationId,
    format: _Format,  # noqa: A002 - the name in the path
    parameters: _Parameters,
    context: Context,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Export a recommendation as files that a framework or launcher reads, with warnings about deviations.

    A target that repeats one micro-batch size cannot reach every effective batch size. Then the export is refused with
    409, `export-inexact`, unless `allow_inexact` accepts the nearest one.
    """
    export = context.exports.export(recommendation_id, parameters.for_format(format))
    return conditional(tagged(export.model_dump_json().encode()), if_none_match, _REVALIDATE)


@router.get(
    "/recommendations/{recommendation_id}/exports/{format}/{file_name}",
    summary="Read one file of an export",
    response_class=Response,
    responses=_TEXT | _REFUSED,
)
def read_exported_file(
    recommendation_id: RecommendationId,
    format: _Format,  # noqa: A002 - the name in the path
    parameters: _Parameters,
    file_name: Annotated[str, Path(description="Name of the file, as listed in the export.", examples=["job.sbatch"])],
    context: Context,
) -> Response:
    """Read one file of an export, without the JSON document around it, for `curl -O` or a pipe.

    The document of the export has the effective batch size and the warnings.
    """
    file = context.exports.file(recommendation_id, parameters.for_format(format), file_name)
    headers = _REVALIDATE | {"X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type="text/plain", headers=headers)
