"""Names, labels and owners of tunings, recommendations and jobs, over HTTP and in the SDK."""

from typing import Any

from batchwright.client.documents.api_keys import Scope
from batchwright.schemas.requests import Named, TrainingRequest
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import tuning_request
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running, StartService

NAMES: dict[str, Any] = {
    "name": "llama, long",
    "project": "language",
    "labels": {"team": "nlp", "example.com/tier": "gold"},
}


def submitted(service: Running, **changes: Any) -> dict[str, Any]:
    """A tuning that has ended."""
    return ended(service.http, service.http.post("/v1/tunings", json=body(**changes)).headers["location"])


def listed(service: Running, kind: str) -> list[dict[str, Any]]:
    """The rows of a list."""
    rows: list[dict[str, Any]] = service.http.get(f"/v1/{kind}").json()["items"]
    return rows


def names_in(document: dict[str, Any]) -> dict[str, Any]:
    """The names of a document or row."""
    return {name: document[name] for name in Named.model_fields}


def test_names_are_kept_from_the_submission_to_the_job(service: Running) -> None:
    """The tuning, its recommendation and a job without names of its own have them, in documents and lists."""
    tuning = submitted(service, **NAMES)
    recommendation = service.http.get(f"/v1/recommendations/{tuning['recommendation_id']}").json()
    answer = service.http.post("/v1/jobs", json={"recommendation_id": recommendation["id"]})
    job = ended(service.http, answer.headers["location"])
    for document in (tuning, tuning["recommendation"], recommendation, job):
        assert names_in(document) == NAMES
    for kind in ("tunings", "recommendations", "jobs"):
        assert [names_in(row) for row in listed(service, kind)] == [NAMES]


def test_a_job_may_have_names_of_its_own(service: Running) -> None:
    """Any name of a job replaces all of its recommendation's."""
    found = submitted(service, **NAMES)["recommendation_id"]
    with service.client as client:
        job = client.jobs.submit(found, TrainingRequest(updates=1), name="night run")
    assert (job.name, job.project, job.labels) == ("night run", None, {})


def test_a_served_recommendation_has_the_names_of_its_caller(service: Running) -> None:
    """No probe runs again; the caller's tuning and recommendation are its own, and the first ones stay as they are."""
    first = submitted(service, **NAMES)
    probes = len(service.runner.sizes)
    answer = service.http.post("/v1/tunings", json=body(name="mine", labels={"team": "vision"}))
    mine = answer.json()
    assert (answer.status_code, len(service.runner.sizes)) == (200, probes)
    assert mine["id"] != first["id"]
    for document in (mine, mine["recommendation"]):
        assert names_in(document) == {"name": "mine", "project": None, "labels": {"team": "vision"}}
    assert mine["fingerprint"] == first["fingerprint"]
    assert mine["recommendation"]["evidence"] == first["recommendation"]["evidence"]
    assert names_in(service.http.get(f"/v1/tunings/{first['id']}").json()) == NAMES


def test_the_same_names_are_served_the_stored_tuning(service: Running) -> None:
    """Neither equal names nor none make another tuning."""
    first = submitted(service, **NAMES)
    for names in (NAMES, {}):
        assert service.http.post("/v1/tunings", json=body(**names)).json()["id"] == first["id"]


def test_wrong_names_are_refused_by_field(service: Running) -> None:
    """The problem names the field and the bounds."""
    for wrong in ({"labels": {"a b": "c"}}, {"labels": {"a": "b c"}}, {"project": "a b"}, {"name": "a\nb"}):
        (field,) = wrong
        problem = problem_in(service.http.post("/v1/tunings", json=body(**wrong)), 422, "invalid-request")
        assert [fault.field.split(".")[0] for fault in problem.errors] == [field]


def test_the_owner_is_the_name_of_the_key(start_service: StartService) -> None:
    """Every list and document names it; names are given in the SDK as over HTTP."""
    service = start_service()
    new, key = make_key("night scheduler", (Scope.ADMIN,))
    service.system.store.keys.add(new)
    service.http.headers["Authorization"] = f"Bearer {key}"
    tuning = submitted(service, **NAMES)
    job = ended(
        service.http,
        service.http.post("/v1/jobs", json={"recommendation_id": tuning["recommendation_id"]}).headers["location"],
    )
    assert tuning["owner"] == job["owner"] == "night scheduler"
    for kind in ("tunings", "recommendations", "jobs"):
        assert [row["owner"] for row in listed(service, kind)] == ["night scheduler"]


def test_names_are_arguments_of_the_sdk(service: Running) -> None:
    """`submit` and `tune` take them."""
    with service.client as client:
        tuning = client.tunings.submit(tuning_request(effective_batch_size=11), **NAMES)
        found = client.tunings.tune(tuning_request(effective_batch_size=12), name="twelve", labels={"n": "12"})
    assert tuning.names == Named.model_validate(NAMES)
    assert (found.name, found.labels) == ("twelve", {"n": "12"})
