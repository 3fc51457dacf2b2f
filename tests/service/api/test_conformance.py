"""Third-party tools against the API: fewer cases, and fewer tools, than ``make conformance`` runs."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.service.conformance import (
    DOCUMENT,
    complete_a_tuning,
    fuzz,
    generate_by_openapi_python_client,
    scripted_service,
    started,
)
from tests.support.service.running import Running

FEW = ("--seed", "1", "--max-examples", "2", "--phases", "examples,fuzzing,stateful")
ONE_OF_EACH = ("--seed", "1", "--max-examples", "1", "--phases", "fuzzing")


@pytest.mark.thorough
def test_schemathesis_finds_no_violation(tmp_path: Path) -> None:
    """Generated requests, and those that links lead to, get the documented responses."""
    with started(scripted_service(tmp_path), tmp_path, keys=True) as service:
        found = fuzz(service, tmp_path, key=service.key, arguments=FEW)
    assert found.failures == 0, found.output
    assert found.phases["stateful"] == "success"
    assert found.cases > 50


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [pytest.param(True, id="keys"), pytest.param(False, id="no keys")])
def test_clients_without_a_key_get_documented_responses(tmp_path: Path, *, keys: bool) -> None:
    """A service with keys responds with 401 or another declared problem, one without keys as to any client."""
    with started(scripted_service(tmp_path), tmp_path, keys=keys) as service:
        found = fuzz(service, tmp_path, key=None, arguments=ONE_OF_EACH)
    assert found.failures == 0, found.output


@pytest.mark.thorough
def test_a_generated_client_completes_a_tuning(tmp_path: Path) -> None:
    """The client that openapi-python-client makes submits, waits, and reads a plan that adds up."""
    generate_by_openapi_python_client(tmp_path)
    with started(scripted_service(tmp_path), tmp_path, keys=True) as service:
        found = complete_a_tuning(sys.executable, "openapi-python-client", tmp_path, service)
    assert found["largest_micro_batch_size"] == 37


def test_every_operation_gives_a_declared_response(shared_service: Running) -> None:
    """Without a body, and about resources that do not exist, each status has its media type in the document."""
    for path, operations in json.loads(DOCUMENT.read_text())["paths"].items():
        for method, operation in operations.items():
            response = shared_service.http.request(method, re.sub(r"{\w+}", "tun_" + "0" * 32, path))
            declared = operation["responses"][str(response.status_code)]["content"]
            assert response.headers["content-type"].partition(";")[0] in declared, (method, path)


def test_every_reference_of_the_document_resolves() -> None:
    """Tools silently skip the references that they cannot resolve."""
    document = json.loads(DOCUMENT.read_text())
    text = DOCUMENT.read_text()
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(document["components"]["schemas"])
