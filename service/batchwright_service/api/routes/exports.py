"""The routes of `/v1/exports` and of the exports of a recommendation."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import WithJsonSchema

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.exports import ExportFormatList, ExportRequest
from batchwright.exports.base import PRINTED, Export, ExportOptions
from batchwright_service.api.authentication import requires_scope
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import IfNoneMatch, RecommendationId
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from batchwright_service.api.problems import ALWAYS, declared
from batchwright_service.api.responses import Responses, links, on_success
from batchwright_service.api.strict_route import StrictRoute

router = APIRouter(prefix="/v1", tags=["exports"], responses=ALWAYS, route_class=StrictRoute)

_DEFAULTS = ExportOptions()
_REFUSED = declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
_TEXT: Responses = {
    200: {
        "description": "The content of the file, ready to be written or piped.",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": "#!/bin/bash\n"}},
    }
}
_REVALIDATE = {"Cache-Control": "private, no-cache"}
"""An export changes with the version of the service, so that caches must revalidate."""


def _option_description(name: str) -> str:
    return " ".join((ExportOptions.model_fields[name].description or "").split())


def _text_query(name: str) -> Any:  # noqa: ANN401 - the type that FastAPI's `Query` returns
    return Query(min_length=1, max_length=1000, pattern=PRINTED, description=_option_description(name))


_SCHEMA = WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 1000, "pattern": PRINTED})
_Format = Annotated[str, Path(description="Name of the export format.", examples=["deepspeed"])]


@dataclass(frozen=True)
class _ExportParameters:
    target_version: str | None
    options: ExportOptions

    def for_format(self, name: str) -> ExportRequest:
        return ExportRequest(format=name, target_version=self.target_version, options=self.options)


def _export_parameters(  # noqa: PLR0913, PLR0917 - one parameter per option
    target_version: Annotated[
        str | None,
        WithJsonSchema({"type": "string", "maxLength": 100}),
        Query(max_length=100, description="Version of the target; the newest when omitted."),
    ] = None,
    allow_inexact: Annotated[bool, Query(description=_option_description("allow_inexact"))] = False,  # noqa: FBT002 - a query parameter
    script: Annotated[str, _SCHEMA, _text_query("script")] = _DEFAULTS.script,
    arguments_of: Annotated[str | None, _SCHEMA, _text_query("arguments_of")] = None,
    job_name: Annotated[str, _SCHEMA, _text_query("job_name")] = _DEFAULTS.job_name,
    processes_per_node: Annotated[
        int | None,
        WithJsonSchema({"type": "integer", "minimum": 1}),
        Query(ge=1, description=_option_description("processes_per_node")),
    ] = None,
    image: Annotated[str, _SCHEMA, _text_query("image")] = _DEFAULTS.image,
    updates: Annotated[
        int | None,
        WithJsonSchema({"type": "integer", "minimum": 1}),
        Query(ge=1, description=_option_description("updates")),
    ] = None,
    queue: Annotated[str | None, _SCHEMA, _text_query("queue")] = None,
) -> _ExportParameters:
    options = ExportOptions(
        allow_inexact=allow_inexact,
        script=script,
        arguments_of=arguments_of,
        job_name=job_name,
        processes_per_node=processes_per_node,
        image=image,
        updates=updates,
        queue=queue,
    )
    return _ExportParameters(target_version, options)


_Parameters = Annotated[_ExportParameters, Depends(_export_parameters)]


@router.get(
    "/exports",
    operation_id="listExportFormats",
    summary="List export formats",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
)
async def list_export_formats(context: Context) -> ExportFormatList:
    """List the formats: frameworks, which take the batch sizes, and launchers, which take the topology."""
    return context.exports.formats()


@router.get(
    "/recommendations/{recommendation_id}/exports/{format}",
    operation_id="exportRecommendation",
    summary="Export a recommendation",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
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
    operation_id="readExportedFile",
    summary="Read one file of an export",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
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
