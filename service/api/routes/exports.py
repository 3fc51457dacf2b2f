"""/v1/exports, and the exports of a recommendation."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import WithJsonSchema

from service.api import examples
from service.api.authentication import needs
from service.api.context import Context
from service.api.dependencies import IfNoneMatch, RecommendationId
from service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from service.api.problems import ALWAYS, declared
from service.api.responses import Responses, links, on_success
from service.api.strict_route import StrictRoute
from service.domain.api_keys import Scope
from service.domain.exports import ExportFormatList, ExportRequest
from tuner.exports.base import PRINTED, Export, ExportOptions

router = APIRouter(prefix="/v1", tags=["exports"], responses=ALWAYS, route_class=StrictRoute)

_DEFAULTS = ExportOptions()
_REFUSED = declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
_TEXT: Responses = {
    200: {
        "description": "The file as it is, ready to be written or piped.",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": "#!/bin/bash\n"}},
    }
}
_SAME_AS_BEFORE = {"Cache-Control": "private, no-cache"}
"""What is exported changes with the service's version."""


def _told(name: str) -> str:
    return " ".join((ExportOptions.model_fields[name].description or "").split())


def _word(name: str) -> Any:  # noqa: ANN401 - what FastAPI's `Query` gives
    return Query(min_length=1, max_length=1000, pattern=PRINTED, description=_told(name))


_SCHEMA = WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 1000, "pattern": PRINTED})
_Format = Annotated[str, Path(description="The target's name.", examples=["deepspeed"])]


@dataclass(frozen=True)
class _Asked:
    target_version: str | None
    options: ExportOptions

    def of(self, name: str) -> ExportRequest:
        return ExportRequest(format=name, target_version=self.target_version, options=self.options)


def _asked(  # noqa: PLR0913, PLR0917 - one parameter per option
    target_version: Annotated[
        str | None,
        WithJsonSchema({"type": "string", "maxLength": 100}),
        Query(max_length=100, description="One of the target's versions; its newest when left out."),
    ] = None,
    allow_inexact: Annotated[bool, Query(description=_told("allow_inexact"))] = False,  # noqa: FBT002 - a query parameter
    script: Annotated[str, _SCHEMA, _word("script")] = _DEFAULTS.script,
    arguments_of: Annotated[str | None, _SCHEMA, _word("arguments_of")] = None,
    job_name: Annotated[str, _SCHEMA, _word("job_name")] = _DEFAULTS.job_name,
    processes_per_node: Annotated[
        int | None,
        WithJsonSchema({"type": "integer", "minimum": 1}),
        Query(ge=1, description=_told("processes_per_node")),
    ] = None,
    image: Annotated[str, _SCHEMA, _word("image")] = _DEFAULTS.image,
    queue: Annotated[str | None, _SCHEMA, _word("queue")] = None,
) -> _Asked:
    options = ExportOptions(
        allow_inexact=allow_inexact,
        script=script,
        arguments_of=arguments_of,
        job_name=job_name,
        processes_per_node=processes_per_node,
        image=image,
        queue=queue,
    )
    return _Asked(target_version, options)


_Asking = Annotated[_Asked, Depends(_asked)]


@router.get(
    "/exports",
    operation_id="listExportFormats",
    summary="List what recommendations can be exported to",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=on_success(content=examples.of("ExportFormatList")),
)
async def list_export_formats(context: Context) -> ExportFormatList:
    """Frameworks, which take the batch figures, and launchers, which take the topology."""
    return context.exports.formats()


@router.get(
    "/recommendations/{recommendation_id}/exports/{format}",
    operation_id="exportRecommendation",
    summary="Export a recommendation",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_model=Export,
    responses=on_success(
        headers=TAG_HEADERS,
        content=examples.of("Export"),
        links=links("recommendation_id", "recommendation_id", "getRecommendation"),
    )
    | NOT_MODIFIED
    | _REFUSED,
)
def export_recommendation(
    recommendation_id: RecommendationId,
    format: _Format,  # noqa: A002 - what the path calls it
    asked: _Asking,
    context: Context,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """A recommendation as files that a framework or launcher reads as they are, with what it gets wrong.

    A target that repeats one micro-batch size cannot reach every effective batch: then it is refused with 409,
    `export-inexact`, unless `allow_inexact` says that the nearest will do.
    """
    export = context.exports.export(recommendation_id, asked.of(format))
    return conditional(tagged(export.model_dump_json().encode()), if_none_match, _SAME_AS_BEFORE)


@router.get(
    "/recommendations/{recommendation_id}/exports/{format}/{file_name}",
    operation_id="readExportedFile",
    summary="Read one file of an export",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=_TEXT | _REFUSED,
)
def read_exported_file(
    recommendation_id: RecommendationId,
    format: _Format,  # noqa: A002 - what the path calls it
    asked: _Asking,
    file_name: Annotated[str, Path(description="Name of the file, as the export lists it.", examples=["job.sbatch"])],
    context: Context,
) -> Response:
    """One file of an export, without the document around it: for `curl -O` or a pipe.

    The effective batch and warnings are in the export's document: read that too.
    """
    file = context.exports.file(recommendation_id, asked.of(format), file_name)
    headers = _SAME_AS_BEFORE | {"X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type="text/plain", headers=headers)
