"""The document of the API, and the page that shows it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from service.api.examples import REQUESTS, RESPONSES
from service.domain import api_keys, exports, work
from service.entrypoints.export_openapi import export_openapi
from tests.support.paths import OPENAPI
from tests.support.service.running import Running
from tuner.schemas.estimates import EstimateRequest
from tuner.schemas.recommendation import Recommendation

DOCUMENT: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
OPERATIONS = {told["operationId"]: told for path in DOCUMENT["paths"].values() for told in path.values()}
LINKS = [
    (operation, name, link)
    for operation, told in OPERATIONS.items()
    for response in told["responses"].values()
    for name, link in response.get("links", {}).items()
]


def test_the_document_in_the_repository_is_the_services_own() -> None:
    """`openapi/openapi.json` is what `python -m service.entrypoints.export_openapi` writes."""
    assert OPENAPI.read_text(encoding="utf-8") == export_openapi(), (
        "run: python -m service.entrypoints.export_openapi > openapi/openapi.json"
    )


def test_the_document_describes_every_call(shared_service: Running) -> None:
    """Each operation has an id of its own and a description, and declares problems by their media type alone."""
    document = shared_service.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for operation in operations:
        assert operation["description"]
        failures = {status: it for status, it in operation["responses"].items() if int(status) >= 400}
        assert {"403", "500", "503"} <= set(failures)
        assert all(set(it["content"]) == {"application/problem+json"} for it in failures.values())
    fields = document["components"]["schemas"]["Tuning"]["properties"].values()
    assert all("description" in field or "$ref" in field for field in fields)


def test_every_operation_has_a_tag_that_is_described() -> None:
    """No tag without a description, and none that is not used."""
    used = {tag for told in OPERATIONS.values() for tag in told["tags"]}
    assert used == {tag["name"] for tag in DOCUMENT["tags"]}
    assert all(tag["description"] for tag in DOCUMENT["tags"])


@pytest.mark.parametrize(("operation", "name", "link"), LINKS)
def test_links_lead_somewhere(operation: str, name: str, link: dict[str, Any]) -> None:
    """Each names an operation, and parameters that it has."""
    target = OPERATIONS[link["operationId"]]
    taken = {parameter["name"] for parameter in target.get("parameters", [])}
    assert set(link.get("parameters", {})) <= taken, (operation, name)


def test_what_a_scheduler_does_is_linked() -> None:
    """From the submission to the tuning, its answer, a job and back: stateful tests follow these."""
    there = {(operation, link["operationId"]) for operation, _, link in LINKS}
    assert {
        ("submitTuning", "getTuning"),
        ("submitTuning", "deleteTuning"),
        ("getTuning", "getRecommendation"),
        ("getRecommendation", "submitJob"),
        ("submitJob", "getJob"),
        ("submitJob", "deleteJob"),
    } <= there


@pytest.mark.parametrize("name", RESPONSES)
def test_examples_of_answers_are_what_they_stand_for(name: str) -> None:
    """Each reads as its document, and is written the same again."""
    kinds: dict[str, type[BaseModel]] = {**vars(exports), **vars(work), "Recommendation": Recommendation}
    kind = kinds[RESPONSES[name]["document"]]
    value = RESPONSES[name]["value"]
    assert TypeAdapter(kind).validate_python(value).model_dump(mode="json") == value


@pytest.mark.parametrize(("document", "name"), [(it, name) for it, named in REQUESTS.items() for name in named])
def test_examples_of_requests_are_accepted(document: str, name: str) -> None:
    """Each is a valid body, read as strictly as the API does."""
    kinds: dict[str, type[BaseModel]] = {
        **vars(exports),
        **vars(work),
        **vars(api_keys),
        "EstimateRequest": EstimateRequest,
    }
    kinds[document].model_validate_json(json.dumps(REQUESTS[document][name]["value"]), strict=True)


def test_what_cannot_be_written_is_not_offered() -> None:
    """No parameter may be `null`: a query or header has no such thing."""
    for told in OPERATIONS.values():
        for parameter in told.get("parameters", []):
            assert "null" not in json.dumps(parameter["schema"]), parameter["name"]


# --- the page ---


def test_the_page_needs_nothing_from_elsewhere(shared_service: Running) -> None:
    """All that it names is served here, without inline scripts, and its policy forbids the rest."""
    page = shared_service.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)", page.text)
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(names) == 5
    for name in names:
        found = httpx.get(f"{shared_service.url}/{name}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"


def test_the_document_is_not_sent_twice(shared_service: Running) -> None:
    """Who has it gets 304."""
    first = shared_service.http.get("/openapi.json")
    again = shared_service.http.get("/openapi.json", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
