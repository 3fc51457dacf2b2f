"""The order and the columns of lists in a real browser, kept in the page's address."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.service.dashboard.test_quality import AXE, VIOLATIONS, WCAG
from tests.support.factories import tuning_request
from tests.support.service.browser import chromium, watched
from tests.support.service.running import Running

SIZES = [6, 100, 37]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the module."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def service(service: Running) -> Running:
    """A service with tunings of different batches."""
    for size in SIZES:
        body = tuning_request(effective_batch_size=size).model_dump(mode="json") | {
            "name": f"run {size}",
            "project": f"no-{size}",
        }
        made = service.http.post("/v1/tunings", json=body).json()
        assert service.http.get(f"/v1/tunings/{made['id']}", params={"wait": 20}).json()["state"] == "SUCCEEDED"
    return service


def expect_order(page: Page, *sizes: int) -> None:
    """The rows have this order."""
    expect(page.locator("tbody th a")).to_have_text([f"run {size}" for size in sizes])


def test_a_click_on_a_head_sorts_the_whole_list(service: Running, browser: Browser) -> None:
    """The largest come first, a second click turns the order round, and the address is a link to it."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        expect_order(page, *reversed(SIZES))
        expect(page.get_by_role("columnheader", name="Submitted")).to_have_attribute("aria-sort", "descending")
        page.get_by_role("button", name="Effective batch").click()
        expect_order(page, 100, 37, 6)
        head = page.get_by_role("columnheader", name="Effective batch")
        expect(head).to_have_attribute("aria-sort", "descending")
        page.keyboard.press("Enter")
        expect_order(page, 6, 37, 100)
        expect(head).to_have_attribute("aria-sort", "ascending")
        expect(head.get_by_role("button")).to_be_focused()
        expect(page).to_have_url(re.compile(r"\?sort=effective_batch_size$"))
        page.reload()
        expect_order(page, 6, 37, 100)
        page.evaluate(AXE)
        assert page.evaluate(VIOLATIONS, WCAG) == []
        page.get_by_label("Select run 37").check()
        page.get_by_role("button", name="Submitted").click()
        expect_order(page, *reversed(SIZES))
        expect(page.get_by_label("Select run 37")).to_be_checked()
        expect(page).to_have_url(re.compile(r"/tunings$"))


def test_a_sorted_list_is_paged_in_its_order(service: Running, browser: Browser) -> None:
    """Filters and the order go together: the service sorts what matches."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings?sort=-effective_batch_size&q=run&state=nothing")
        expect_order(page, 100, 37, 6)
        page.get_by_label("Search").fill("run no-37")
        expect_order(page, 37)
        expect(page).to_have_url(re.compile(r"\?q=run\+no-37&sort=-effective_batch_size$"))
        page.get_by_label("Search").fill("nowhere")
        page.get_by_role("button", name="Clear the filters").click()
        expect_order(page, 100, 37, 6)
        expect(page.get_by_label("Search")).to_have_value("")


def test_columns_are_chosen_and_kept_in_the_address(service: Running, browser: Browser) -> None:
    """A column that is not wanted leaves; the row's name always stays."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        page.get_by_text("Columns", exact=True).click()
        expect(page.get_by_role("checkbox", name="Tuning", exact=True)).to_have_count(0)
        page.get_by_role("checkbox", name="Plan", exact=True).uncheck()
        expect(page.get_by_role("columnheader", name="Plan")).to_have_count(0)
        expect(page).to_have_url(re.compile(r"\?hide=Plan$"))
        page.reload()
        expect_order(page, *reversed(SIZES))
        expect(page.get_by_role("columnheader", name="Plan")).to_have_count(0)


def test_narrow_pages_sort_by_a_choice(service: Running, browser: Browser) -> None:
    """Cards have no heads to click on."""
    with watched(browser, service.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open("/tunings")
        page.get_by_label("Order").select_option("Effective batch, ascending")
        expect_order(page, 6, 37, 100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_list_of_jobs_shows_how_far_they_are(service: Running, browser: Browser) -> None:
    """The updates that are done, and the losses as a line with its ends in words."""
    found = service.http.get("/v1/recommendations").json()["items"][0]["id"]
    made = service.http.post("/v1/jobs", json={"recommendation_id": found, "training": {"updates": 5}}).json()
    assert service.http.get(f"/v1/jobs/{made['id']}", params={"wait": 20}).json()["state"] == "SUCCEEDED"
    with watched(browser, service.url) as opened:
        page = opened.open("/jobs")
        expect(page.get_by_role("meter", name="Updates done")).to_have_attribute("aria-valuetext", "5 of 5")
        expect(page.get_by_role("img", name=re.compile(r"^Loss from \d\S* to \d\S*$"))).to_be_visible()
        page.evaluate(AXE)
        assert page.evaluate(VIOLATIONS, WCAG) == []
