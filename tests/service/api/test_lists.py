"""Lists: filters, cursors, and the agreement of rows with their documents."""

import csv
import threading
from typing import Any

import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import WorkOutcome
from batchwright.client.documents.work import JobPage, JobSubmission, RecommendationPage, TuningPage
from batchwright.errors import WorkloadError
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.application.views import decode_cursor, encode_cursor
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import gpt_spec, mlp_spec, recommendation
from tests.support.service.asking import PATIENCE_SECONDS, body, ended, ended_job, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped


def ids(service: Running, path: str, **params: Any) -> list[str]:
    """Return the identifiers in a list."""
    response = service.http.get(path, params=params)
    assert response.status_code == 200
    return [item["id"] for item in response.json()["items"]]


def submitted(service: Running, **changes: Any) -> dict[str, Any]:
    """A tuning that has ended."""
    return ended(service.http, service.http.post("/v1/tunings", json=body(**changes)).headers["location"])


def test_tunings_are_filtered(service: Running) -> None:
    """Each filter narrows the list, and all filters apply together."""
    mlp = submitted(service, spec=mlp_spec().model_dump(mode="json"))
    gpt = submitted(service, spec=gpt_spec().model_dump(mode="json"))
    assert ids(service, "/v1/tunings", model="mlp") == [mlp["id"]]
    assert ids(service, "/v1/tunings", fingerprint=gpt["fingerprint"]) == [gpt["id"]]
    assert ids(service, "/v1/tunings", device="cpu", state="SUCCEEDED") == [gpt["id"], mlp["id"]]
    assert ids(service, "/v1/tunings", model="mlp", fingerprint=gpt["fingerprint"]) == []
    assert ids(service, "/v1/tunings", device="cuda:0") == []
    assert ids(service, "/v1/tunings", state="FAILED") == []


def test_jobs_show_their_course(start_service: StartService) -> None:
    """Updates done of all, remaining time and losses, in the list and alone, while the job runs."""
    trainer = Trainer(hold_at=6)
    service = start_service(trainer=trainer)
    submission = JobSubmission(recommendation=recommendation(), training=TrainingRequest(updates=20))
    made = service.http.post("/v1/jobs", json=submission.model_dump(mode="json")).json()
    assert made["course"] is None
    assert trainer.holding.wait(PATIENCE_SECONDS)
    (row,) = service.http.get("/v1/jobs").json()["items"]
    course = row["course"]
    assert (course["update"], course["updates"]) == (5, 20)
    assert course["seconds_remaining"] == pytest.approx(15 * 0.01)
    assert course["losses"] == [float(f"{1 / update:.5g}") for update in range(1, 6)]
    assert service.http.get(f"/v1/jobs/{made['id']}").json()["course"] == course
    with service.client as client:
        (listed,) = client.jobs.list()
        assert listed.course is not None
        assert listed.course.updates == 20
    trainer.hold_at = None


def test_lists_carry_the_answers(service: Running) -> None:
    """Rows and documents have the figures of the recommendation, which the recommendation's document confirms."""
    waiting = service.http.post("/v1/tunings", json=body(effective_batch_size=9)).json()
    assert (waiting["feasible"], waiting["plan"], waiting["samples_per_second"]) == (None, None, None)
    tuning = submitted(service)
    found = tuning["recommendation"]
    response = service.http.post("/v1/jobs", json={"recommendation_id": found["id"]})
    made = ended(service.http, response.headers["location"])
    plan = {name: value for name, value in found["plan"].items() if name != "micro_batch_sizes"}
    (rate,) = [other["samples_per_second"] for other in found["alternatives"] if other["chosen"]]
    figures = {
        "feasible": True,
        "plan": plan,
        "largest_micro_batch_size": found["largest_micro_batch_size"],
        "peak_bytes": found["headroom"]["peak_bytes"],
        "limit_bytes": found["headroom"]["limit_bytes"],
        "samples_per_second": rate,
    }
    rows = [service.http.get(f"/v1/{kind}").json()["items"][0] for kind in ("tunings", "recommendations", "jobs")]
    for document in (tuning, made, *rows):
        assert {name: document[name] for name in figures} == figures


def test_a_list_says_that_nothing_fits(start_service: StartService) -> None:
    """An infeasible answer differs from a feasible one, and has no plan: in lists, files, the summary and metrics."""
    service = start_service(ScriptedRunner(0))
    tuning = submitted(service)
    (row,) = service.http.get("/v1/tunings").json()["items"]
    assert (row["state"], row["outcome"], row["feasible"], row["plan"]) == ("SUCCEEDED", "infeasible", False, None)
    assert (tuning["outcome"], tuning["recommendation"]["feasible"]) == ("infeasible", False)
    (line,) = csv.DictReader(service.http.get("/v1/tunings?format=csv").text.splitlines())
    assert (line["state"], line["outcome"]) == ("SUCCEEDED", "infeasible")
    summary = service.http.get("/v1/summary").json()
    assert (summary["tunings"]["SUCCEEDED"], summary["infeasible"]) == (1, 1)
    metrics = service.http.get("/metrics").text
    assert 'batchwright_tuning_seconds_count{outcome="infeasible",state="SUCCEEDED"} 1.0' in metrics
    assert 'batchwright_tuning_seconds_count{outcome="succeeded",state="SUCCEEDED"} 0.0' in metrics


def test_recommendations_are_listed_by_the_time_that_they_say(service: Running) -> None:
    """A copy for another name is as new as the tuning that it answers, and names the tuning that ran the probes."""
    first = submitted(service)
    other = submitted(service, effective_batch_size=5)
    copied = submitted(service, name="again")
    rows = service.http.get("/v1/recommendations").json()["items"]
    assert [row["tuning_id"] for row in rows] == [copied["id"], other["id"], first["id"]]
    assert [row["created_at"] for row in rows] == sorted((row["created_at"] for row in rows), reverse=True)
    assert copied["recommendation"]["evidence"] == first["recommendation"]["evidence"]
    assert copied["recommendation"]["evidence"]["tuning_id"] == first["id"]


def test_rows_name_the_key_that_submitted_them(service: Running) -> None:
    """Its id and its name, also of recommendations, for which a page links to all of one owner."""
    key, text = make_key("night", (Scope.ADMIN,))
    service.system.store.keys.add(key)
    service.http.headers["Authorization"] = f"Bearer {text}"
    submitted(service)
    for kind in ("tunings", "recommendations"):
        (row,) = service.http.get(f"/v1/{kind}").json()["items"]
        assert (row["key_id"], row["owner"]) == (key.id, "night")


def test_jobs_are_filtered(service: Running) -> None:
    """Jobs are filtered by state, device, model and fingerprint, over HTTP and in the SDK."""
    made = ended_job(service)
    assert ids(service, "/v1/jobs", state="SUCCEEDED", device="cpu", model="mlp") == [made["id"]]
    assert ids(service, "/v1/jobs", state="QUEUED") == []
    assert ids(service, "/v1/jobs", model="gpt") == []
    assert ids(service, "/v1/jobs", fingerprint="0f") == []
    with service.client as client:
        assert [row.id for row in client.jobs.list(fingerprint=made["recommendation"]["fingerprint"])] == [made["id"]]


def test_recommendations_are_filtered_by_precision_and_objective(service: Running) -> None:
    """Both narrow the list, over HTTP and in the SDK; rows have both, and unknown values are refused."""
    spec = mlp_spec(precision="bf16-mixed").model_dump(mode="json")
    mixed = submitted(service, spec=spec)["recommendation_id"]
    fewest = submitted(service, spec=spec, objective="fewest_steps")["recommendation_id"]
    plain = submitted(service)["recommendation_id"]
    with service.client as client:
        listed = client.recommendations.list
        assert [tuning.id for tuning in listed(precision="bf16-mixed", page_size=1)] == [fewest, mixed]
        (found,) = listed(objective="fewest_steps", precision="bf16-mixed", model="mlp", device="cpu")
        assert (found.id, found.precision, found.objective) == (fewest, "bf16-mixed", "fewest_steps")
    assert ids(service, "/v1/recommendations", precision="fp32", objective="largest") == [plain]
    for name in ("precision", "objective"):
        problem = problem_in(service.http.get("/v1/recommendations", params={name: "fp8"}), 422, "invalid-request")
        assert problem.errors[0].field == name


def test_a_state_that_does_not_exist_is_refused(shared_service: Running) -> None:
    """422 names the valid states."""
    problem = problem_in(shared_service.http.get("/v1/tunings?state=DONE"), 422, "invalid-request")
    assert "'SUCCEEDED'" in problem.errors[0].message


def test_a_cursor_belongs_to_its_list(shared_service: Running) -> None:
    """A cursor of another list, or any other text, is 400."""
    number = "0" * 32
    lists = {"/v1/tunings": f"t{number}", "/v1/jobs": f"j{number}", "/v1/recommendations": f"r{number}"}
    for path in lists:
        for owner, cursor in lists.items():
            response = shared_service.http.get(path, params={"cursor": cursor})
            if owner == path:
                assert response.json()["items"] == []
            else:
                problem_in(response, 400, "invalid-cursor")
        problem_in(shared_service.http.get(path, params={"cursor": f"tun_{number}"}), 400, "invalid-cursor")


def test_cursors_name_identifiers() -> None:
    """A cursor decodes to the identifier that it encodes."""
    identifier = "rec_" + "0a" * 16
    assert decode_cursor(encode_cursor(identifier), "rec") == identifier


def test_pages_are_written_as_their_documents(service: Running) -> None:
    """Lists are written from rows directly; their JSON equals that of the documents."""
    submitted(service)
    ended_job(service)
    kinds: list[tuple[str, type[TuningPage | JobPage | RecommendationPage]]] = [
        ("/v1/tunings", TuningPage),
        ("/v1/jobs", JobPage),
        ("/v1/recommendations", RecommendationPage),
    ]
    for path, kind in kinds:
        text = service.http.get(path).text
        page = kind.model_validate_json(text)
        assert page.items
        assert page.model_dump_json() == text


def test_a_listed_tuning_is_current(start_service: StartService) -> None:
    """A cached row is not used after any change of the tuning."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    assert started.wait(PATIENCE_SECONDS)
    for state in ("RUNNING", "CANCELLED"):
        for _ in range(2):
            (listed,) = service.http.get("/v1/tunings").json()["items"]
            tuning = service.http.get(location).json()
            assert listed == {name: tuning[name] for name in listed}
            assert listed["state"] == state
        service.http.post(f"{location}/cancel")
        ended(service.http, location)


def test_a_recommendation_is_sent_as_it_is_stored(service: Running) -> None:
    """Parsing and serializing it again would give the same bytes."""
    tuning = submitted(service)
    text = service.http.get(f"/v1/recommendations/{tuning['recommendation_id']}").text
    stored = service.system.store.recommendations.get(tuning["recommendation_id"])
    assert stored.model_dump_json() == text


@pytest.mark.parametrize("path", ["/v1/tunings", "/v1/jobs", "/v1/recommendations", "/v1/queue"])
@pytest.mark.parametrize("limit", ["0", "201", "x"])
def test_limits_are_bounded(shared_service: Running, path: str, limit: str) -> None:
    """A limit is from 1 to 200."""
    problem_in(shared_service.http.get(path, params={"limit": limit}), 422, "invalid-request")


def test_lists_are_searched_and_sorted_over_http(service: Running) -> None:
    """Words, labels and an order narrow and arrange a list; cursors go on in that order, and in no other."""
    for name, size in (("beta", 5), ("alpha", 6), ("gamma", 7)):
        submitted(service, name=name, labels={"team": "nlp", "size": str(size)}, effective_batch_size=size)
    listed: dict[str, Any] = {"label": ["team=nlp"], "sort": "name", "limit": 2}
    first = service.http.get("/v1/tunings", params=listed).json()
    rest = service.http.get("/v1/tunings", params=listed | {"cursor": first["next_cursor"]}).json()
    assert [row["name"] for row in first["items"] + rest["items"]] == ["alpha", "beta", "gamma"]
    assert rest["next_cursor"] is None
    for kind in ("tunings", "recommendations"):
        found = service.http.get(f"/v1/{kind}", params={"q": "ALPH mlp", "label": ["team=nlp", "size=6"]}).json()
        assert [row["name"] for row in found["items"]] == ["alpha"]
    for wrong in ({"sort": "model"}, {}):
        answer = service.http.get("/v1/tunings", params={"cursor": first["next_cursor"], **wrong})
        problem_in(answer, 400, "invalid-cursor")
    for broken in ("t" + "0" * 32 + ".e30", "t" + "0" * 32 + ".MQ", "t" + "0" * 32 + ".WyJuYW1lIiwxXQ"):
        problem_in(service.http.get("/v1/tunings", params=listed | {"cursor": broken}), 400, "invalid-cursor")
    wrong_times = (("created_after", "yesterday"), ("created_after", "0.5"), ("created_after", "20260131"))
    for name, value in (("sort", "size"), ("label", "team"), *wrong_times):
        problem = problem_in(service.http.get("/v1/tunings", params={name: value}), 422, "invalid-request")
        assert problem.errors[0].field.split(".")[0] == name
    for path, words in (("recommendations?stale=0", "true or false"), ("audit?until=1767225600", "a date and time")):
        problem = problem_in(service.http.get(f"/v1/{path}"), 422, "invalid-request")
        assert words in problem.errors[0].message
    assert service.http.get("/v1/audit?until=2026-01-31T12:00:00Z").is_success
    with service.client as client:
        assert [row.name for row in client.tunings.list(search="amm", labels={"team": "nlp"})] == ["gamma"]
        assert [row.name for row in client.tunings.list(sort="-name", page_size=1)] == ["gamma", "beta", "alpha"]
        assert [row.name for row in client.recommendations.list(search="beta")] == ["beta"]


def test_each_result_is_listed_once_with_its_uses(service: Running) -> None:
    """Of recommendations with one fingerprint the newest that matches is listed; a total counts what all pages have."""
    first = submitted(service, name="one")
    other = submitted(service, effective_batch_size=5)["recommendation_id"]
    copy = submitted(service, name="two")["recommendation_id"]

    def listed(**params: Any) -> tuple[list[tuple[str, int | None]], int | None]:
        page = service.http.get("/v1/recommendations", params=params).json()
        return [(row["id"], row["uses"]) for row in page["items"]], page["total"]

    assert listed(distinct="true", total="true") == ([(copy, 2), (other, 1)], 2)
    assert listed(sort="uses") == ([(other, 1), (copy, 2)], None)
    assert listed(distinct="true", q="one") == ([(first["recommendation_id"], 1)], None)
    assert listed(total="true", limit=1) == ([(copy, None)], 3)
    page = service.http.get("/v1/recommendations", params={"sort": "-uses", "limit": 1}).json()
    rest = service.http.get("/v1/recommendations", params={"sort": "-uses", "cursor": page["next_cursor"]}).json()
    assert [row["id"] for row in page["items"] + rest["items"]] == [copy, other]
    with service.client as client:
        assert [row.uses for row in client.recommendations.list(distinct=True)] == [2, 1]


def test_lists_are_filtered_by_outcome_and_tell_why_work_failed(start_service: StartService) -> None:
    """A tuning without a plan is no success; the row of a failed one has its problem, as the document has it."""
    service = start_service()
    fits = submitted(service)["id"]
    service.runner.largest = 0
    nothing = submitted(service, effective_batch_size=7)["id"]
    service.runner.spec_error = WorkloadError("The loss is no tensor.")
    failed = submitted(service, effective_batch_size=8)
    for outcome, found in (("succeeded", fits), ("infeasible", nothing), ("failed", failed["id"])):
        page = service.http.get("/v1/tunings", params={"outcome": outcome, "total": "true"}).json()
        assert ([row["id"] for row in page["items"]], page["total"]) == ([found], 1)
    assert page["items"][0]["problem"] == failed["problem"]
    assert ids(service, "/v1/tunings", outcome="cancelled") == []
    with service.client as client:
        assert [row.id for row in client.tunings.list(outcome=WorkOutcome.INFEASIBLE)] == [nothing]
