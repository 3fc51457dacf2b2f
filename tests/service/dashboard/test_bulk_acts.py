"""Cancel, delete and compare several rows of a list in a real browser."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import recommendation, tuning_request
from tests.support.service.browser import violations, watched
from tests.support.service.running import Running
from tests.support.service.stores import engine_at, fill

UNSERVED = "cuda:7"
"""A device that no worker of the tests serves, so that its work stays in the queue."""


def ended(service: Running, size: int, **named: Any) -> str:
    """Make a tuning that has ended, and return its id."""
    headers = named.pop("headers", None)
    sent = tuning_request(effective_batch_size=size).model_dump(mode="json") | named
    made = service.http.post("/v1/tunings", json=sent, headers=headers).json()
    found = service.http.get(f"/v1/tunings/{made['id']}", params={"wait": 20}, headers=headers).json()
    assert found["state"] == State.SUCCEEDED
    return str(made["id"])


def queued(service: Running, count: int) -> list[str]:
    """Store tunings that wait."""
    with engine_at(service.settings.url) as engine:
        return fill(engine, count, device=UNSERVED)


def state_of(service: Running, tuning_id: str) -> str | None:
    """Return the state of a tuning; None when it was deleted."""
    response = service.http.get(f"/v1/tunings/{tuning_id}")
    return None if response.status_code == 404 else response.json()["state"]


def bar(page: Page) -> Locator:
    """The bar with the acts."""
    return page.get_by_role("group", name="Selection")


def test_the_keyboard_chooses_tunings_and_keeps_them(browser: Browser, service: Running) -> None:
    """Select with the space bar; the dialog names the chosen ones, keeps them by default, and gives the focus back."""
    first, *_ = (ended(service, size, name=f"run {size}") for size in (5, 6, 7))
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        expect(bar(page)).to_contain_text("Select all 3 shown")
        for name in ("run 5", "run 6"):
            page.get_by_label(f"Select {name}").focus()
            page.keyboard.press("Space")
        expect(bar(page).get_by_role("status")).to_have_text("2 tunings selected")
        button = bar(page).get_by_role("button", name="Delete 2 tunings")
        button.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Delete 2 tunings?")
        expect(dialog).to_contain_text("run 6")
        expect(dialog).to_contain_text("run 5")
        expect(dialog).to_contain_text("Their recommendations stay")
        assert violations(page) == []
        expect(page.locator(":focus")).to_have_text("Keep them")
        page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        expect(page.locator(":focus")).to_have_text("Delete 2 tunings")
        assert state_of(service, first) == State.SUCCEEDED


def test_the_keyboard_deletes_chosen_tunings(browser: Browser, service: Running) -> None:
    """The second button of the dialog deletes, and the result is announced; the others stay."""
    first, second, left = (ended(service, size, name=f"run {size}") for size in (5, 6, 7))
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        for name in ("run 5", "run 6"):
            page.get_by_label(f"Select {name}").check()
        bar(page).get_by_role("button", name="Delete 2 tunings").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Delete 2 tunings?")).to_be_visible()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_text("2 tunings deleted", exact=True)).to_be_visible()
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(bar(page).get_by_role("status")).to_be_empty()
        assert violations(page) == []
    assert [state_of(service, name) for name in (first, second, left)] == [None, None, State.SUCCEEDED]


@pytest.mark.thorough
def test_each_refusal_is_shown_with_its_reason(browser: Browser, service: Running) -> None:
    """A tuning that another page has deleted meanwhile is refused by name, the other is deleted, and both leave."""
    gone, other = ended(service, 5, name="gone"), ended(service, 6, name="other")
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        page.get_by_label("Select all").check()
        bar(page).get_by_role("button", name="Delete 2 tunings").click()
        assert service.http.delete(f"/v1/tunings/{gone}").status_code == 204
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        results = page.get_by_role("status").filter(has_text="1 tuning deleted, 1 refused")
        expect(results.locator("li").first).to_have_text(
            f"gone: No tuning with the id '{gone}'. It may have been deleted."
        )
        results.get_by_text("Show them").click()
        expect(results.locator("details li")).to_have_text("other: deleted")
        expect(page.get_by_text("No tunings yet")).to_be_visible()
        expect(bar(page)).to_be_hidden()
    assert state_of(service, other) is None


@pytest.mark.thorough
def test_chosen_rows_stay_chosen_while_the_list_is_read_again(browser: Browser, service: Running) -> None:
    """A row that changes keeps its tick and the focus; one that leaves the list is no longer chosen."""
    (waiting,) = queued(service, 1)
    gone = ended(service, 5, name="gone")
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        page.get_by_label("Select gone").check()
        box = page.get_by_label(f"Select {waiting}")
        box.check()
        service.http.post(f"/v1/tunings/{waiting}/cancel")
        service.http.delete(f"/v1/tunings/{gone}")
        expect(bar(page).get_by_role("button", name="Delete 1 tuning", exact=True)).to_be_visible()
        expect(box).to_be_checked()
        expect(box).to_be_focused()
        expect(bar(page).get_by_role("status")).to_have_text("1 tuning selected")


@pytest.mark.thorough
def test_tunings_are_compared_by_their_recommendations(browser: Browser, service: Running) -> None:
    """From the list of tunings, without those that have none."""
    for size in (5, 6):
        ended(service, size)
    queued(service, 1)
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        page.get_by_label("Select all").check()
        bar(page).get_by_role("link", name="Compare 2 recommendations").click()
        batch = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="Effective batch"))
        expect(batch.get_by_role("cell")).to_have_text(["6", "5"])


def test_acts_follow_the_scopes_and_the_owner(browser: Browser, service: Running) -> None:
    """Acts are offered on one's own work; a key that only reads chooses jobs for nothing, and sees no boxes."""
    keys = [make_key(name, (Scope.TUNINGS_READ, Scope.TUNINGS_WRITE, Scope.JOBS_READ)) for name in ("mine", "other")]
    for new, _ in keys:
        service.system.store.keys.add(new)
    for (_, text), name in zip(keys, ("my run", "foreign run"), strict=True):
        ended(service, 5, name=name, fresh=True, headers={"Authorization": f"Bearer {text}"})
    with watched(browser, service.url) as opened:
        page = opened.open("/sign-in?next=/tunings")
        page.get_by_label("API key").fill(keys[0][1])
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("Select foreign run").check()
        expect(bar(page).get_by_role("status")).to_have_text("1 tuning selected")
        expect(bar(page).get_by_role("button")).to_have_count(0)
        page.get_by_label("Select my run").check()
        expect(bar(page).get_by_role("button", name="Delete 1 tuning", exact=True)).to_be_visible()
        page = opened.open("/jobs")
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        expect(bar(page)).to_have_count(0)


@pytest.mark.thorough
def test_jobs_are_deleted_with_what_is_theirs(browser: Browser, service: Running) -> None:
    """The dialog of jobs names their files."""
    body = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 5}}
    made = [service.http.post("/v1/jobs", json=body).json()["id"] for _ in range(2)]
    for name in made:
        assert service.http.get(f"/v1/jobs/{name}", params={"wait": 20}).json()["ended_at"]
    with watched(browser, service.url) as opened:
        page = opened.open("/jobs")
        page.get_by_label("Select all").check()
        bar(page).get_by_role("button", name="Delete 2 jobs").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("logs, checkpoints and weights")
        dialog.get_by_role("button", name="Delete 2 jobs").click()
        expect(page.get_by_text("2 jobs deleted", exact=True)).to_be_visible()
    assert {service.http.get(f"/v1/jobs/{name}").status_code for name in made} == {404}
