"""Filters of lists as chips in a real browser: added, removed by mouse and keyboard, kept in the page's address."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from service.domain.api_keys import Scope, make_key
from service.domain.problems import Problem
from service.domain.states import State
from tests.service.dashboard.test_quality import AXE, VIOLATIONS, WCAG
from tests.support.service.browser import watched
from tests.support.service.running import Running
from tests.support.service.stores import engine_at, fill

PROBLEM = Problem(type="about:blank", title="It failed", detail="The workload failed.", code="workload-error")


@pytest.fixture
def service(service: Running) -> Running:
    """A service with tunings of three states, two models, and two projects."""
    with engine_at(service.settings.url) as engine:
        fill(engine, 3, state=State.CANCELLED, model="gpt", project="language")
        fill(engine, 2, state=State.SUCCEEDED, model="vit", project="vision")
        failure: dict[str, Any] = {"problem": PROBLEM.model_dump_json(), "problem_code": PROBLEM.code, "ended_at": 5}
        fill(engine, 1, state=State.FAILED, model="vit", labels="\nteam=a\ntier=b\n", **failure)
    return service


def rows(page: Page) -> Locator:
    """The rows of the list."""
    return page.locator("tbody tr")


def chips(page: Page) -> Locator:
    """The set filters."""
    return page.get_by_role("list", name="Set filters").locator(".chip")


def remove(page: Page, text: str) -> None:
    """Click on a chip."""
    page.get_by_role("button", name=f"Remove the filter {text}", exact=True).click()


def test_each_filter_is_a_chip_that_a_click_removes(service: Running, browser: Browser) -> None:
    """States add up, another model replaces the first, and the address has what is set."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        expect(rows(page)).to_have_count(6)
        expect(chips(page)).to_have_count(0)
        page.get_by_role("combobox", name="State").select_option("Cancelled")
        expect(rows(page)).to_have_count(3)
        page.get_by_role("combobox", name="State").select_option("Failed")
        expect(rows(page)).to_have_count(4)
        expect(page).to_have_url(re.compile(r"\?state=CANCELLED&state=FAILED$"))
        page.get_by_label("Filter by").select_option("Model")
        page.get_by_role("combobox", name="Model").fill("gpt")
        page.get_by_role("combobox", name="Model").press("Enter")
        expect(rows(page)).to_have_count(3)
        page.get_by_role("combobox", name="Model").fill("nothing")
        page.get_by_role("button", name="Add", exact=True).click()
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        expect(chips(page)).to_have_text(
            [re.compile(text) for text in ("State: Cancelled", "State: Failed", "Model: nothing")]
        )
        page.evaluate(AXE)
        assert page.evaluate(VIOLATIONS, WCAG) == []
        remove(page, "Model: nothing")
        expect(rows(page)).to_have_count(4)
        remove(page, "State: Cancelled")
        expect(rows(page)).to_have_count(1)
        expect(page).to_have_url(re.compile(r"\?state=FAILED$"))


def test_the_keyboard_adds_and_removes_filters(service: Running, browser: Browser) -> None:
    """Delete and Enter remove a chip; the focus goes to the next one, then back to the fields."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings?project=vision&state=SUCCEEDED&state=FAILED")
        expect(rows(page)).to_have_count(2)
        expect(chips(page)).to_have_count(3)
        page.get_by_label("Filter by").focus()
        for key in ("Tab", "Tab"):
            page.keyboard.press(key)
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter State: Succeeded")
        page.keyboard.press("Delete")
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter State: Failed")
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter Project: vision")
        expect(rows(page)).to_have_count(2)
        page.keyboard.press("Backspace")
        expect(page.locator(":focus")).to_have_accessible_name("Filter by")
        expect(rows(page)).to_have_count(6)
        expect(page).to_have_url(re.compile(r"/tunings$"))
        page.get_by_label("Filter by").select_option("Label")
        page.keyboard.press("Tab")
        page.keyboard.type("team")
        page.keyboard.press("Enter")
        expect(chips(page)).to_have_count(0)
        page.keyboard.type("=a")
        page.keyboard.press("Enter")
        expect(chips(page)).to_have_count(1)
        expect(rows(page)).to_have_count(1)


def test_filters_of_the_address_are_shown_and_cleared_together(service: Running, browser: Browser) -> None:
    """Also the time, and what no option offers is left out; all of them go with one click."""
    with watched(browser, service.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open(
            "/tunings?state=FAILED&state=nothing&problem_code=workload-error&created_after=2100-01-02T03:04:05Z"
        )
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        expect(chips(page)).to_have_text(
            [
                re.compile(text)
                for text in ("State: Failed", "Created after: .* Jan 2100", "Cause of failure: workload-error")
            ]
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name=re.compile("Created after")).click()
        expect(rows(page)).to_have_count(1)
        page.reload()
        expect(rows(page)).to_have_count(1)
        page.get_by_role("button", name="Clear all").click()
        expect(rows(page)).to_have_count(6)
        expect(chips(page)).to_have_count(0)
        expect(page.get_by_label("Filter by")).to_be_focused()
        page.get_by_label("Filter by").select_option("Created after")
        page.get_by_label("Created after", exact=True).fill("2100-01-02T03:04")
        page.get_by_role("button", name="Add", exact=True).click()
        expect(page.get_by_text("No matches for these filters")).to_be_visible()


def test_projects_and_owners_lead_to_their_lists(service: Running, browser: Browser) -> None:
    """A click on a row's project or owner filters the list by it."""
    new, text = make_key("night scheduler", (Scope.ADMIN,))
    service.system.store.keys.add(new)
    with engine_at(service.settings.url) as engine:
        fill(engine, 2, keys=(new.id,), state=State.CANCELLED)
    with watched(browser, service.url) as opened:
        page = opened.open("/sign-in?next=/tunings")
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        expect(rows(page)).to_have_count(8)
        page.get_by_role("link", name="night scheduler").first.click()
        expect(rows(page)).to_have_count(2)
        expect(chips(page)).to_have_text([re.compile("Owner: night scheduler")])
        remove(page, "Owner: night scheduler")
        page.get_by_role("link", name="vision").first.click()
        expect(rows(page)).to_have_count(2)
        expect(chips(page)).to_have_text([re.compile("Project: vision")])
