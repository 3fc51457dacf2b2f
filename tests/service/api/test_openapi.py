"""The OpenAPI document, and the page that shows it."""

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from batchwright.client.documents import api_keys, bulk, exports, webhooks, work
from batchwright.schemas.estimates import EstimateRequest
from batchwright_service.api.examples import REQUESTS
from tests.support.paths import OPENAPI
from tests.support.service.api_document import EXAMPLES, document, examples
from tests.support.service.running import Running

DOCUMENT: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
OPERATIONS = {operation["operationId"]: operation for path in DOCUMENT["paths"].values() for operation in path.values()}
LINKS = [
    (identifier, name, link)
    for identifier, operation in OPERATIONS.items()
    for response in operation["responses"].values()
    for name, link in response.get("links", {}).items()
]


def test_the_document_in_the_repository_is_current() -> None:
    """`openapi/openapi.json`, and the examples of responses in it, are what `make openapi` writes."""
    assert EXAMPLES.read_text(encoding="utf-8") == examples(), "run: make openapi"
    assert OPENAPI.read_text(encoding="utf-8") == document(), "run: make openapi"


def test_the_document_describes_every_operation(shared_service: Running) -> None:
    """Each operation has a unique id and a description, and declares problems by their media type alone."""
    document = shared_service.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for operation in operations:
        assert operation["description"]
        failures = {status: response for status, response in operation["responses"].items() if int(status) >= 400}
        assert {"403", "500", "503"} <= set(failures)
        assert all(set(response["content"]) == {"application/problem+json"} for response in failures.values())
    fields = document["components"]["schemas"]["Tuning"]["properties"].values()
    assert all("description" in field or "$ref" in field for field in fields)


def test_every_operation_has_a_tag_that_is_described() -> None:
    """Every tag has a description and is used."""
    used = {tag for operation in OPERATIONS.values() for tag in operation["tags"]}
    assert used == {tag["name"] for tag in DOCUMENT["tags"]}
    assert all(tag["description"] for tag in DOCUMENT["tags"])


@pytest.mark.parametrize(("operation", "name", "link"), LINKS)
def test_links_name_operations_and_parameters(operation: str, name: str, link: dict[str, Any]) -> None:
    """Each link names an operation and parameters of that operation."""
    target = OPERATIONS[link["operationId"]]
    taken = {parameter["name"] for parameter in target.get("parameters", [])}
    assert set(link.get("parameters", {})) <= taken, (operation, name)


def test_the_steps_of_a_scheduler_are_linked() -> None:
    """Links lead from the submission to the tuning, its recommendation, a job and back, for stateful tests."""
    there = {(operation, link["operationId"]) for operation, _, link in LINKS}
    assert {
        ("submitTuning", "getTuning"),
        ("submitTuning", "deleteTuning"),
        ("getTuning", "getRecommendation"),
        ("getRecommendation", "submitJob"),
        ("submitJob", "getJob"),
        ("submitJob", "deleteJob"),
    } <= there


@pytest.mark.parametrize(
    ("document", "name"), [(document, name) for document, named in REQUESTS.items() for name in named]
)
def test_examples_of_requests_are_accepted(document: str, name: str) -> None:
    """Each is a valid body under strict validation."""
    kinds: dict[str, type[BaseModel]] = {
        **vars(bulk),
        **vars(exports),
        **vars(work),
        **vars(api_keys),
        **vars(webhooks),
        "EstimateRequest": EstimateRequest,
    }
    kinds[document].model_validate_json(json.dumps(REQUESTS[document][name]["value"]), strict=True)


def test_no_parameter_may_be_null() -> None:
    """A query or header cannot express `null`."""
    for operation in OPERATIONS.values():
        for parameter in operation.get("parameters", []):
            assert "null" not in json.dumps(parameter["schema"]), parameter["name"]


def test_the_default_of_a_parameter_is_of_its_type() -> None:
    """Also that of a truth value, which a query expresses by a word."""
    schemas = [each["schema"] for operation in OPERATIONS.values() for each in operation.get("parameters", ())]
    defaults = [(schema, schema["default"]) for schema in schemas if {"type", "default"} <= schema.keys()]
    assert {"type": "string", "enum": ["true", "false"], "default": "false", "title": "Total"} in schemas
    assert all(isinstance(default, str) is (schema["type"] == "string") for schema, default in defaults), defaults


# --- the page ---


def test_the_page_loads_nothing_from_other_hosts(shared_service: Running) -> None:
    """All its files are served here, without inline scripts, and its policy forbids others."""
    page = shared_service.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)", page.text)
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(names) == 7
    for name in names:
        found = httpx.get(f"{shared_service.url}/{name}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"


def test_the_document_is_not_sent_twice(shared_service: Running) -> None:
    """A client with the current document gets 304."""
    first = shared_service.http.get("/openapi.json")
    again = shared_service.http.get("/openapi.json", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
