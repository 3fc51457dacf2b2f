"""Hostile requests: forged host names, and bodies that are slow to parse."""

import json
import socket
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright_service.api.middleware.security import MAX_DEPTH, MAX_VALUES, check_structure, host_name
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import BodyTooLargeError, MalformedJsonError
from tests.support.factories import recommendation, tuning_request
from tests.support.service.asking import PATIENCE_SECONDS, problem_in
from tests.support.service.running import Running, StartService

JSON = {"Content-Type": "application/json"}
ROUTES = ("/v1/tunings", "/v1/jobs", "/v1/estimates", "/v1/keys")


@pytest.mark.parametrize(
    "forged",
    [
        "evil.com@127.0.0.1",
        "evil.com:80@localhost",
        "@localhost",
        "localhost:80:80",
        "localhost:+80",
        "localhost:99999",
        "localhost:\uff180",
        "local%68ost",
        "localhost/",
        "localhost?x",
        "localhost#x",
        "localhost\\",
        " localhost",
        "local host",
        "localhost,evil.com",
        "[::1",
        "::1",
        "[::1]x",
        "[::1%25lo]",
        "[127.0.0.1]",
        "[::1]@localhost",
        "",
        ":80",
        ".",
    ],
)
def test_an_invalid_host_header_has_no_name(forged: str) -> None:
    """Userinfo, escapes, paths, wrong ports and incomplete addresses are invalid."""
    assert host_name(forged) not in {"localhost", "127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:8000", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("localhost:", "localhost"),
        ("[::1]:8000", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("ops-1.example_internal", "ops-1.example_internal"),
    ],
)
def test_a_valid_host_header_is_normalized(header: str, name: str) -> None:
    """Names are in lower case, addresses in their shortest form, and the port may be empty."""
    assert host_name(header) == name


def test_a_forged_host_is_refused_on_every_path(shared_service: Running) -> None:
    """An allowed name as the host of a URL, or in one of two Host headers, is refused, by health routes too."""
    for path in ("/v1/tunings", "/metrics", "/", "/livez", "/readyz", "/openapi.json"):
        answer = shared_service.http.get(path, headers={"Host": "evil.com@127.0.0.1"})
        problem_in(answer, 403, "host-not-allowed")


def test_health_routes_accept_any_host_name(shared_service: Running) -> None:
    """A kubelet and a load balancer use the pod's address; other routes accept the allowed names alone."""
    for path in ("/livez", "/readyz", "/readyz/database"):
        for host in ("10.42.0.17:8000", "[fd00::17]:8000", "batchwright.svc"):
            assert shared_service.http.get(path, headers={"Host": host}).status_code == HTTPStatus.OK
    for path in ("/v1/tunings", "/metrics", "/openapi.json", "/docs", "/sign-in"):
        problem_in(shared_service.http.get(path, headers={"Host": "10.42.0.17:8000"}), 403, "host-not-allowed")


def test_metrics_with_a_key_accept_any_host_name(start_service: StartService) -> None:
    """Prometheus finds pods by their addresses. A wrong key is refused, and no page of another site has a valid one."""
    service = start_service()
    stored, text = make_key("prometheus", (Scope.TUNINGS_READ,))
    service.system.store.keys.add(stored)
    pod = {"Host": "10.42.0.17:8000"}
    assert service.http.get("/metrics", headers=pod | bearer(text)).status_code == HTTPStatus.OK
    problem_in(service.http.get("/metrics", headers=pod | bearer("bw_0_0")), 401, "not-authenticated")
    problem_in(service.http.get("/v1/tunings", headers=pod | bearer(text)), 403, "host-not-allowed")
    problem_in(service.http.get("/metrics", headers={"Host": "a@b"} | bearer(text)), 403, "host-not-allowed")


def bearer(key: str) -> dict[str, str]:
    """Return the header with an API key."""
    return {"Authorization": f"Bearer {key}"}


def tuning(unknown: int) -> bytes:
    """Return a submission with unknown keys."""
    document: dict[str, Any] = tuning_request().model_dump(mode="json")
    return json.dumps(document | {f"unknown{number}": 0 for number in range(unknown)}).encode()


def test_many_faults_are_counted_and_the_first_twenty_listed(shared_service: Running) -> None:
    """The response stays small, and gives the number of faults."""
    answer = shared_service.http.post("/v1/tunings", content=tuning(9_000), headers=JSON)
    problem = problem_in(answer, 422, "invalid-request")
    assert len(problem.errors) == 20
    assert problem.error_count == 9_000
    assert problem.detail.startswith("9000 faults; the first 20: unknown0: ")
    assert len(answer.content) < 50_000


def test_few_faults_are_all_listed(shared_service: Running) -> None:
    """Up to twenty faults are listed, without their number."""
    problem = problem_in(
        shared_service.http.post("/v1/tunings", content=tuning(20), headers=JSON), 422, "invalid-request"
    )
    assert [fault.field for fault in problem.errors] == [f"unknown{number}" for number in range(20)]
    assert problem.error_count is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"{" + b",".join(b'"%x":0' % number for number in range(80_000)) + b"}",
        b"[" + b"0," * 100_000 + b"0]",
        b"[{}" + b",{}" * 100_000 + b"]",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 65 + b"0" + b"}" * 65,
    ],
    ids=["keys", "elements", "objects", "deep", "just-too-deep"],
)
def test_a_body_of_many_values_or_levels_is_refused_unparsed(
    shared_service: Running, route: str, content: bytes
) -> None:
    """Every route that accepts JSON refuses such a body."""
    answer = shared_service.http.post(route, content=content, headers=JSON)
    assert "the body" in problem_in(answer, 413, "body-too-large").detail


def accepts(content: bytes) -> bool:
    """Return whether the structure of a body is accepted."""
    try:
        check_structure(content)
    except BodyTooLargeError:
        return False
    return True


COMMAS = b"," * (MAX_DEPTH + 1)
"""More than a body may have whose strings are not looked for."""


@pytest.mark.parametrize(
    ("content", "accepted"),
    [
        (COMMAS + b'"' + b'\\"' * 500_000, True),
        (COMMAS + b'"\\' * 300_000, True),
        (b"," * 1_000_000, False),
        (b"{" * 1_000_000, False),
    ],
    ids=["escaped-quotes", "quotes-and-escapes", "commas", "brackets"],
)
def test_the_structure_of_any_text_is_read_in_linear_time(content: bytes, accepted: bool) -> None:  # noqa: FBT001 - a parameter
    """In unterminated strings a search that restarts at each quote takes hours, which the limit of each test ends."""
    assert accepts(content) is accepted


def test_the_content_of_strings_is_not_counted() -> None:
    """Commas and brackets in strings do not count, and an escaped quote does not end a string."""
    check_structure(json.dumps({"text": '[{,"\\' * 30_000}).encode())
    check_structure(b'"' + b"[" * 100_000)
    check_structure(b'"\\')
    check_structure(json.dumps([[0]] * (MAX_VALUES // 2 - 1)).encode())
    with pytest.raises(BodyTooLargeError):
        check_structure(json.dumps([0] * (MAX_VALUES + 2)).encode())
    check_structure(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(BodyTooLargeError):
        check_structure(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_is_utf_8(encoding: str) -> None:
    """Another encoding would hide structure from the count."""
    with pytest.raises(MalformedJsonError):
        check_structure('{"a": 0}'.encode(encoding))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b'{"device": "\xff"}', ": byte 12 is not UTF-8"),
        (b'{"effective_batch_size": ' + b"9" * 5000 + b"}", ": Exceeds the limit (4300 digits)"),
        (b'{"device": "\\ud800"}', ": unexpected end of hex escape"),
        (b'{"device": }', ": Expecting value"),
    ],
)
def test_malformed_json_is_reported_with_its_reason(shared_service: Running, sent: bytes, reason: str) -> None:
    """Every such problem has one code and a message with the reason."""
    headers = {"content-type": "application/json"}
    answer = shared_service.http.post("/v1/tunings", content=sent, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed-json")
    assert reason in answer.json()["detail"]


def test_the_largest_documents_in_use_are_accepted() -> None:
    """A recommendation with its evidence, and a configuration with the names of a thousand classes."""
    document = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 1}}
    check_structure(json.dumps(document).encode())
    classes = {
        "id2label": {str(index): f"class {index}" for index in range(1000)},
        "label2id": {f"c{index}": index for index in range(1000)},
    }
    check_structure(json.dumps(classes).encode())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/sign-in", "/livez", "/docs"])
def test_unauthenticated_clients_send_some_kibibytes_at_most(
    shared_service: Running, path: str, *, chunked: bool
) -> None:
    """Bodies of public routes are refused above 8192 bytes, though callers with a key may send 1 MiB."""
    large = b"key=" + b"x" * 9000
    content = iter([large[:4500], large[4500:]]) if chunked else large
    answer = shared_service.http.post(
        path, content=content, headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert "8192" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        [("Idempotency-Key", "a"), ("Idempotency-Key", "b")],
        [("Idempotency-Key", "a"), ("idempotency-key", "a")],
        [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
        [("X-CSRF-Token", "a"), ("X-CSRF-Token", "b")],
        [("Content-Length", "2"), ("Transfer-Encoding", "chunked")],
    ],
)
def test_headers_that_contradict_are_refused(shared_service: Running, headers: list[tuple[str, str]]) -> None:
    """A proxy before the service may take the other one."""
    port = httpx.URL(shared_service.url).port
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    chunked = "2\r\n{}\r\n0\r\n\r\n" if "chunked" in lines else ""
    request = f"POST /v1/tunings HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{lines}\r\n{chunked}"
    with socket.create_connection(("127.0.0.1", port or 0), PATIENCE_SECONDS) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
    assert answer.startswith("HTTP/1.1 422"), answer
    assert headers[0][0].lower() in answer.lower()


def test_a_body_with_two_lengths_ends_the_connection(shared_service: Running) -> None:
    """What follows on it may belong to the body, by the other of the two (RFC 9112, 6.3)."""
    port = httpx.URL(shared_service.url).port
    smuggled = f"GET /livez HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    request = (
        f"POST /v1/tunings HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 7\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{smuggled}"
    )
    with socket.create_connection(("127.0.0.1", port or 0), PATIENCE_SECONDS) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
    assert answer.startswith("HTTP/1.1 422"), answer
    assert answer.count("HTTP/1.1 ") == 1
