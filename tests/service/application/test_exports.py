"""Exports over HTTP and through the SDK; what is in them is the business of tests/exports."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from batchwright.client import ApiError, ConflictError, NotFoundError
from batchwright.client.documents.exports import ExportRequest
from batchwright.client.resources.api import AsyncCalls
from batchwright.errors import ExportError, ExportRefusal
from batchwright.exports.base import ExportOptions
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.problem_mapping import problem_of
from tests.support.factories import mlp_spec, recommendation, tuning_request
from tests.support.service.asking import problem_in
from tests.support.service.running import Running
from tests.support.service.scripted import ScriptedRunner
from tests.support.service.scripted_network import Driver

Against = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio"])
def against(request: pytest.FixtureRequest) -> Against:
    """Runs calls against a service, through both clients, one after the other."""
    return Driver(request.param).against


@pytest.fixture(scope="module")
def stored(shared_service: Running) -> Recommendation:
    """A recommendation of 37 samples at most for 100: 34 + 33 + 33, or four times 25."""
    with shared_service.client as client:
        return client.tunings.tune(tuning_request(effective_batch_size=100))


@pytest.fixture(scope="module")
def odd(shared_service: Running) -> Recommendation:
    """One for 101 samples over two ranks, which no repeated size reaches."""
    spec = mlp_spec(parallelism={"world_size": 2})
    with shared_service.client as client:
        return client.tunings.tune(tuning_request(spec, effective_batch_size=101))


def test_every_refusal_is_a_problem_of_its_own() -> None:
    """Whatever the reason, there is a status and a code for it."""
    for reason in get_args(ExportRefusal):
        problem = problem_of(ExportError(reason, "because"))
        assert problem.status in {404, 409, 422}
        assert (problem.code, problem.detail) == (f"export-{reason}", "because")


def test_every_format_is_listed(shared_service: Running) -> None:
    """By the registry's names, in its order."""
    items = shared_service.http.get("/v1/exports").json()["items"]
    assert [item["format"] for item in items] == list(TARGETS)
    assert all(item["versions"] for item in items)


def test_the_export_is_that_of_the_tuner(shared_service: Running, stored: Recommendation) -> None:
    """The response is equal, and 304 for a caller that has it."""
    path = f"/v1/recommendations/{stored.id}/exports/hugging-face"
    answer = shared_service.http.get(path)
    assert answer.json() == export(stored, "hugging-face").model_dump(mode="json")
    assert shared_service.http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_a_file_can_be_read_alone(shared_service: Running, stored: Recommendation) -> None:
    """As text; one that is not there is not found, and the others are named."""
    path = f"/v1/recommendations/{stored.id}/exports/hugging-face"
    made = export(stored, "hugging-face").files[0]
    answer = shared_service.http.get(f"{path}/{made.name}")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == made.content
    assert made.name in problem_in(shared_service.http.get(f"{path}/nothing.txt"), 404, "not-found").detail


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/exports/excel", 404, "export-unknown-format"),
        ("/exports/hugging-face?target_version=0.1", 422, "export-unknown-version"),
        ("/exports/hugging-face?arguments_of=hugging-face", 422, "export-wrong-option"),
        ("/exports/hugging-face?processes_per_node=0", 422, "invalid-request"),
        ("/exports/hugging-face?script=a%0Ab", 422, "invalid-request"),
    ],
)
def test_wrong_questions_are_told(
    shared_service: Running, stored: Recommendation, path: str, status: int, code: str
) -> None:
    """Each with a stable code."""
    problem_in(shared_service.http.get(f"/v1/recommendations/{stored.id}{path}"), status, code)


def test_an_unknown_recommendation_is_not_found(shared_service: Running) -> None:
    """Well-formed and malformed ids get the same error."""
    for identifier in ("rec_" + "0" * 32, "..%2Fx"):
        problem_in(shared_service.http.get(f"/v1/recommendations/{identifier}/exports/deepspeed"), 404, "not-found")


def test_what_would_change_the_batch_is_refused(shared_service: Running, odd: Recommendation) -> None:
    """Unless it is allowed; then it says what it became."""
    path = f"/v1/recommendations/{odd.id}/exports/hugging-face"
    assert "allow_inexact" in problem_in(shared_service.http.get(path), 409, "export-inexact").detail
    allowed = shared_service.http.get(path, params={"allow_inexact": "true"}).json()
    assert (allowed["plan"]["effective_batch_size"], allowed["plan"]["exact"]) == (100, False)


def test_what_does_not_fit_cannot_be_exported(start_service: Callable[..., Running]) -> None:
    """The error is a conflict and gives the reason why nothing fits."""
    service = start_service(ScriptedRunner(0))
    with service.client as client:
        nothing = client.tunings.tune(tuning_request())
    answer = service.http.get(f"/v1/recommendations/{nothing.id}/exports/hugging-face")
    assert "does not fit" in problem_in(answer, 409, "export-infeasible").detail


def test_the_sdk_exports(
    against: Against, shared_service: Running, stored: Recommendation, odd: Recommendation
) -> None:
    """Lists the formats, exports with options, and raises what it raises elsewhere."""

    async def use(calls: AsyncCalls) -> None:
        assert [listed.format for listed in await calls.recommendations.formats()] == list(TARGETS)
        made = await calls.recommendations.export(stored.id, "hugging-face", target_version="5.23")
        assert made == export(stored, "hugging-face")
        with pytest.raises(ConflictError):
            await calls.recommendations.export(odd.id, "hugging-face")
        near = await calls.recommendations.export(odd.id, "hugging-face", options=ExportOptions(allow_inexact=True))
        assert near.plan.effective_batch_size == 100
        with pytest.raises(NotFoundError):
            await calls.recommendations.export(stored.id, "no/such")
        (file,) = made.files
        assert await calls.recommendations.exported_file(stored.id, "hugging-face", file.name) == file.content

    against(shared_service.url, use)


def test_a_dry_run_exports(against: Against, shared_service: Running) -> None:
    """The configured job carries the export that was asked for; a run that is no dry one takes none."""
    asked = ExportRequest(format="hugging-face")

    async def use(calls: AsyncCalls) -> None:
        configured = await calls.jobs.configure(recommendation(), export=asked)
        assert configured.export == export(recommendation(), "hugging-face")
        assert (await calls.jobs.configure(recommendation(), TrainingRequest(updates=1))).export is None
        with pytest.raises(ApiError) as refused:
            await calls.jobs.configure(recommendation(), export=ExportRequest(format="excel"))
        assert refused.value.problem.code == "export-unknown-format"

    against(shared_service.url, use)
    body = {"recommendation": recommendation().model_dump(mode="json"), "export": asked.model_dump(mode="json")}
    problem_in(shared_service.http.post("/v1/jobs", json=body), 422, "invalid-request")
