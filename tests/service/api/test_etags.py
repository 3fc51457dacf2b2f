"""Entity tags, and long polls that end as soon as there is news."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from service.api.etags import conditional, tagged
from service.domain.work import JobSubmission
from tests.support.factories import recommendation
from tests.support.service.asking import PATIENCE_SECONDS, UNKNOWN, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped


@pytest.fixture
def answered(service: Running) -> str:
    """Where a tuning is that has ended."""
    location: str = service.http.post("/v1/tunings", json=body()).headers["location"]
    ended(service.http, location)
    return location


@pytest.fixture
def running(start_service: StartService) -> Iterator[tuple[Running, str]]:
    """A service, and where a tuning is whose first probe runs until it is cancelled."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    assert started.wait(PATIENCE_SECONDS)
    yield service, location
    service.http.post(f"{location}/cancel")


def test_what_is_known_is_not_sent(service: Running, answered: str) -> None:
    """304 without a body, with the same tag; any of several tags will do, weakened ones too."""
    first = service.http.get(answered)
    assert first.headers["cache-control"] == "private, no-cache"
    etag = first.headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = service.http.get(answered, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (HTTPStatus.NOT_MODIFIED, b"", etag)
    assert service.http.get(answered, headers={"If-None-Match": '"other"'}).content == first.content


def test_a_recommendation_may_be_kept(service: Running, answered: str) -> None:
    """It never changes: caches of the caller's own may keep it, and ask with its tag."""
    path = f"/v1/recommendations/{service.http.get(answered).json()['recommendation_id']}"
    first = service.http.get(path)
    assert "private" in first.headers["cache-control"]
    assert "max-age=" in first.headers["cache-control"]
    again = service.http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == HTTPStatus.NOT_MODIFIED


def test_the_tag_changes_whenever_the_body_does(running: tuple[Running, str]) -> None:
    """Every event of a tuning makes another representation with another tag."""
    service, location = running
    before = service.http.get(location)
    service.http.post(f"{location}/cancel")
    after = service.http.get(location)
    assert before.content != after.content
    assert before.headers["etag"] != after.headers["etag"]
    assert tagged(b"a").etag != tagged(b"b").etag


def test_what_has_not_ended_says_when_to_look_again(running: tuple[Running, str]) -> None:
    """`Retry-After` is there until the end, with or without a wait, and for 304 too."""
    service, location = running
    first = service.http.get(location, params={"wait": 0.1})
    assert first.headers["retry-after"] == "1"
    known = service.http.get(location, headers={"If-None-Match": first.headers["etag"]})
    assert (known.status_code, known.headers["retry-after"]) == (HTTPStatus.NOT_MODIFIED, "1")


def test_what_has_ended_needs_no_other_look(service: Running, answered: str) -> None:
    """No `Retry-After`, and no wait."""
    began = time.monotonic()
    response = service.http.get(answered, params={"wait": 30})
    assert "retry-after" not in response.headers
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_news_end_a_wait_for_what_is_known(running: tuple[Running, str]) -> None:
    """With `If-None-Match` a wait ends at the next event, long before the tuning has ended."""
    service, location = running
    etag = service.http.get(location).headers["etag"]
    threading.Timer(0.3, lambda: service.http.post(f"{location}/cancel")).start()
    response = service.http.get(
        location, params={"wait": 30}, headers={"If-None-Match": etag}, timeout=PATIENCE_SECONDS
    )
    assert response.status_code == HTTPStatus.OK
    assert response.headers["etag"] != etag
    assert response.json()["state"] in {"CANCELLING", "CANCELLED"}


def test_old_news_end_a_wait_at_once(running: tuple[Running, str]) -> None:
    """Who knows another representation is not kept waiting."""
    service, location = running
    began = time.monotonic()
    response = service.http.get(
        location, params={"wait": 30}, headers={"If-None-Match": '"old"'}, timeout=PATIENCE_SECONDS
    )
    assert response.json()["state"] == "RUNNING"
    assert time.monotonic() - began < 10


def test_a_wait_without_news_ends_with_nothing_new(running: tuple[Running, str]) -> None:
    """304 when the time is up."""
    service, location = running
    etag = service.http.get(location).headers["etag"]
    response = service.http.get(location, params={"wait": 0.4}, headers={"If-None-Match": etag})
    assert response.status_code == HTTPStatus.NOT_MODIFIED


def test_a_job_has_a_tag_that_changes_with_every_update(start_service: StartService) -> None:
    """An update of a job is news."""
    trainer = Trainer(hold_at=3)
    service = start_service(trainer=trainer)
    submission = JobSubmission(recommendation=recommendation())
    location = service.http.post("/v1/jobs", json=submission.model_dump(mode="json")).headers["location"]
    assert trainer.holding.wait(PATIENCE_SECONDS)
    held = service.http.get(location)
    assert held.json()["progress"]["update"] == 2
    trainer.hold_at = None
    headers = {"If-None-Match": held.headers["etag"]}
    news = service.http.get(location, params={"wait": 30}, headers=headers, timeout=PATIENCE_SECONDS)
    assert news.json()["events"] > held.json()["events"]


# --- HEAD ---


def test_head_is_get_without_the_body(service: Running, answered: str) -> None:
    """The same status and headers, problems included."""
    told, got = service.http.head(answered), service.http.get(answered)
    assert (told.status_code, told.content) == (HTTPStatus.OK, b"")
    for name in ("etag", "content-type", "content-length"):
        assert told.headers[name] == got.headers[name]
    missing = service.http.head(f"/v1/tunings/{UNKNOWN}")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    assert problem_in(service.http.get(f"/v1/tunings/{UNKNOWN}"), 404, "not-found")


def test_head_of_a_stream_does_not_follow_it(running: tuple[Running, str]) -> None:
    """It is answered at once, although the stream would go on."""
    service, location = running
    response = service.http.head(f"{location}/events", timeout=PATIENCE_SECONDS)
    assert response.headers["content-type"].startswith("text/event-stream")


def test_a_tag_is_compared_as_it_is() -> None:
    """No header, no match; the answer carries the tag either way."""
    current = tagged(b"{}")
    assert conditional(current, None, {}).status_code == HTTPStatus.OK
    assert conditional(current, current.etag, {}).headers["etag"] == current.etag
