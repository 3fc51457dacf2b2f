"""Entity tags, and long polls that end at a change."""

import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from batchwright.client.documents.work import JobSubmission
from batchwright_service.api.etags import conditional, tagged
from batchwright_service.api.events.change_feed import ChangeFeed
from tests.support.factories import recommendation
from tests.support.service.asking import PATIENCE_SECONDS, UNKNOWN, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped


@pytest.fixture
def ended_tuning(service: Running) -> str:
    """The path of a tuning that has ended."""
    location: str = service.http.post("/v1/tunings", json=body()).headers["location"]
    ended(service.http, location)
    return location


@pytest.fixture
def running_tuning(start_service: StartService) -> Iterator[tuple[Running, str]]:
    """A service, and the path of a tuning whose first probe runs until it is cancelled."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    assert started.wait(PATIENCE_SECONDS)
    yield service, location
    service.http.post(f"{location}/cancel")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the work that requests wait for, from the moment they begin to."""
    begun: list[str] = []
    wait = ChangeFeed.wait

    async def recorded(feed: ChangeFeed, work_id: str, seen: int, timeout: float) -> bool:  # noqa: ASYNC109 - as its original
        begun.append(work_id)
        return await wait(feed, work_id, seen, timeout)

    monkeypatch.setattr(ChangeFeed, "wait", recorded)
    return begun


def test_a_known_representation_is_not_sent(service: Running, ended_tuning: str) -> None:
    """304 without a body, with the same tag, for any of several tags, weak ones included."""
    first = service.http.get(ended_tuning)
    assert first.headers["cache-control"] == "private, no-cache"
    etag = first.headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = service.http.get(ended_tuning, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (HTTPStatus.NOT_MODIFIED, b"", etag)
    assert service.http.get(ended_tuning, headers={"If-None-Match": '"other"'}).content == first.content


def test_a_recommendation_may_be_cached(service: Running, ended_tuning: str) -> None:
    """A recommendation never changes: private caches may keep it, and revalidate it by its tag."""
    path = f"/v1/recommendations/{service.http.get(ended_tuning).json()['recommendation_id']}"
    first = service.http.get(path)
    assert "private" in first.headers["cache-control"]
    assert "max-age=" in first.headers["cache-control"]
    again = service.http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == HTTPStatus.NOT_MODIFIED


def test_the_tag_changes_whenever_the_body_does(running_tuning: tuple[Running, str]) -> None:
    """Every event of a tuning changes the representation and its tag."""
    service, location = running_tuning
    before = service.http.get(location)
    service.http.post(f"{location}/cancel")
    after = service.http.get(location)
    assert before.content != after.content
    assert before.headers["etag"] != after.headers["etag"]
    assert tagged(b"a").etag != tagged(b"b").etag


def test_running_work_has_retry_after(running_tuning: tuple[Running, str]) -> None:
    """`Retry-After` is present until the end, with or without a wait, and for 304 too."""
    service, location = running_tuning
    first = service.http.get(location, params={"wait": 0.1})
    assert first.headers["retry-after"] == "1"
    known = service.http.get(location, headers={"If-None-Match": first.headers["etag"]})
    assert (known.status_code, known.headers["retry-after"]) == (HTTPStatus.NOT_MODIFIED, "1")


def test_ended_work_has_no_retry_after(service: Running, ended_tuning: str, waits: list[str]) -> None:
    """The response comes without a wait and without `Retry-After`."""
    waits.clear()
    response = service.http.get(ended_tuning, params={"wait": 30})
    assert "retry-after" not in response.headers
    assert waits == []


def test_a_change_ends_a_wait_with_a_known_tag(running_tuning: tuple[Running, str], waits: list[str]) -> None:
    """With `If-None-Match` a wait ends at the next event, long before the tuning has ended."""
    service, location = running_tuning
    etag = service.http.get(location).headers["etag"]

    def cancel_once_awaited() -> None:
        while not waits:
            time.sleep(0.01)
        service.http.post(f"{location}/cancel")

    threading.Thread(target=cancel_once_awaited, daemon=True).start()
    response = service.http.get(
        location, params={"wait": 30}, headers={"If-None-Match": etag}, timeout=PATIENCE_SECONDS
    )
    assert response.status_code == HTTPStatus.OK
    assert response.headers["etag"] != etag
    assert response.json()["state"] in {"CANCELLING", "CANCELLED"}


def test_an_outdated_tag_ends_a_wait_at_once(running_tuning: tuple[Running, str], waits: list[str]) -> None:
    """A caller with another representation gets the current one without a wait."""
    service, location = running_tuning
    response = service.http.get(
        location, params={"wait": 30}, headers={"If-None-Match": '"old"'}, timeout=PATIENCE_SECONDS
    )
    assert response.json()["state"] == "RUNNING"
    assert waits == []


def test_a_wait_without_a_change_ends_with_304(running_tuning: tuple[Running, str]) -> None:
    """304 is sent when the time is up."""
    service, location = running_tuning
    etag = service.http.get(location).headers["etag"]
    response = service.http.get(location, params={"wait": 0.4}, headers={"If-None-Match": etag})
    assert response.status_code == HTTPStatus.NOT_MODIFIED


def test_a_job_has_a_tag_that_changes_with_every_update(start_service: StartService) -> None:
    """An optimizer update of a job ends a wait."""
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


def test_head_is_get_without_the_body(service: Running, ended_tuning: str) -> None:
    """The status and headers are those of GET, for problems too."""
    head, get = service.http.head(ended_tuning), service.http.get(ended_tuning)
    assert (head.status_code, head.content) == (HTTPStatus.OK, b"")
    for name in ("etag", "content-type", "content-length"):
        assert head.headers[name] == get.headers[name]
    missing = service.http.head(f"/v1/tunings/{UNKNOWN}")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    assert problem_in(service.http.get(f"/v1/tunings/{UNKNOWN}"), 404, "not-found")


def test_head_of_a_stream_does_not_follow_it(running_tuning: tuple[Running, str]) -> None:
    """The response is immediate, although the stream would continue."""
    service, location = running_tuning
    response = service.http.head(f"{location}/events", timeout=PATIENCE_SECONDS)
    assert response.headers["content-type"].startswith("text/event-stream")


def test_a_tag_is_compared_exactly() -> None:
    """Without the header nothing matches; the response carries the tag in both cases."""
    current = tagged(b"{}")
    assert conditional(current, None, {}).status_code == HTTPStatus.OK
    assert conditional(current, current.etag, {}).headers["etag"] == current.etag
