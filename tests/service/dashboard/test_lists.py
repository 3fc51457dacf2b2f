"""The order, the columns and the filters of lists in a real browser, kept in the page's address."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import tuning_request
from tests.support.service.browser import violations, watched
from tests.support.service.running import Running, StartService
from tests.support.service.stores import engine_at, fill

SIZES = [6, 100, 37]
PROBLEM = Problem(type="about:blank", title="It failed", detail="The workload failed.", code="workload-error")


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
    expect(page.locator("tbody th a:not(.tag)")).to_have_text([f"run {size}" for size in sizes])


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
        assert violations(page) == []
        page.get_by_label("Select run 37").check()
        page.get_by_role("button", name="Submitted").click()
        expect_order(page, *reversed(SIZES))
        expect(page.get_by_label("Select run 37")).to_be_checked()
        expect(page).to_have_url(re.compile(r"/tunings$"))


@pytest.mark.thorough
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


@contextmanager
def held(page: Page, address: re.Pattern[str], method: str = "GET") -> Iterator[None]:
    """Hold back the requests to an address until the end of the block."""
    routes: list[Route] = []
    page.route(address, lambda route: routes.append(route) if route.request.method == method else route.continue_())
    yield
    for route in routes:
        route.continue_()
    page.unroute(address)


FILTERED = re.compile(r"/v1/tunings\?.*q=cuda")


def test_nothing_is_loaded_below_a_list_that_is_being_replaced(service: Running, browser: Browser) -> None:
    """While a changed filter is loading there is no page to go on from; afterwards there is."""
    with engine_at(service.settings.url) as engine:
        fill(engine, 60, device="cuda:7")
        fill(engine, 60, device="cuda:6")
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        rows = page.locator("tbody tr")
        expect(rows.filter(has_text="cuda:6")).to_have_count(50)
        more = page.get_by_role("button", name="Load more")
        with held(page, FILTERED):
            with page.expect_request(FILTERED):
                page.get_by_label("Search").fill("cuda:7")
            more.click()
            expect(more).to_be_enabled()
            expect(page.get_by_role("alert")).to_have_count(0)
        expect(rows.filter(has_text="cuda:7")).to_have_count(50)
        more.click()
        expect(rows.filter(has_text="cuda:7")).to_have_count(60)


@pytest.mark.thorough
def test_an_act_that_ends_while_a_filter_is_loading_empties_no_list(service: Running, browser: Browser) -> None:
    """The rows of before stay until those of the filter are read."""
    with engine_at(service.settings.url) as engine:
        fill(engine, 5, device="cuda:7")
    bulk = re.compile(r"/v1/tunings/bulk$")
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(8)
        rows.filter(has_text="cuda:7").first.get_by_role("checkbox").check()
        page.get_by_role("button", name="Cancel 1 tuning").click()
        with held(page, FILTERED):
            with held(page, bulk, "POST"):
                with page.expect_request(bulk):
                    page.get_by_role("dialog").get_by_role("button", name="Cancel 1 tuning").click()
                with page.expect_request(FILTERED):
                    page.get_by_label("Search").fill("cuda:7")
            expect(page.get_by_text("1 tuning cancelled")).to_be_visible()
            expect(rows).to_have_count(8)
        expect(rows).to_have_count(5)
        expect(rows.filter(has_text="Cancelled")).to_have_count(1)


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


@pytest.mark.thorough
def test_narrow_pages_sort_by_a_choice(service: Running, browser: Browser) -> None:
    """Cards have no heads to click on; a list without an order to choose has none."""
    with watched(browser, service.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open("/tunings")
        page.get_by_role("button", name="Filters").click()
        page.get_by_label("Order").select_option("Effective batch, ascending")
        expect_order(page, 6, 37, 100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page = opened.open("/audit")
        page.get_by_role("button", name="Filters").click()
        expect(page.get_by_role("combobox", name="Action", exact=True)).to_be_visible()
        expect(page.get_by_label("Order")).to_have_count(0)


@pytest.mark.thorough
def test_the_list_of_jobs_shows_how_far_they_are(service: Running, browser: Browser) -> None:
    """The updates that are done, and the losses as a line with its ends in words."""
    found = service.http.get("/v1/recommendations").json()["items"][0]["id"]
    made = service.http.post("/v1/jobs", json={"recommendation_id": found, "training": {"updates": 5}}).json()
    assert service.http.get(f"/v1/jobs/{made['id']}", params={"wait": 20}).json()["state"] == "SUCCEEDED"
    with watched(browser, service.url) as opened:
        page = opened.open("/jobs")
        expect(page.get_by_role("meter", name="Updates done")).to_have_attribute("aria-valuetext", "5 of 5")
        expect(page.get_by_role("img", name=re.compile(r"^Loss from \d\S* to \d\S*$"))).to_be_visible()
        assert violations(page) == []


# --- rows, views and keys ---


def test_a_failed_row_tells_why_and_the_list_how_many_there_are(varied: Running, browser: Browser) -> None:
    """The cause is on the row's one line; the total counts all that match, and heads stay in sight."""
    with engine_at(varied.settings.url) as engine:
        fill(engine, 60, state=State.CANCELLED, model="gpt")
    with watched(browser, varied.url, viewport={"width": 1440, "height": 700}) as opened:
        page = opened.open("/tunings")
        expect(page.get_by_text("66 tunings", exact=True)).to_be_visible()
        failed = rows(page).filter(has_text="Failed")
        page.get_by_role("button", name="Failed", exact=True).click()
        expect(page.get_by_text("1 tuning", exact=True).first).to_be_visible()
        expect(failed).to_contain_text("workload-error The workload failed.")
        assert failed.evaluate("(row) => row.getBoundingClientRect().height") <= 37
        page.get_by_role("button", name="Failed", exact=True).click()
        expect(rows(page)).to_have_count(50)
        page.mouse.wheel(0, 1200)
        expect(page.get_by_role("columnheader", name="Model")).to_be_in_viewport()
        expect(page.get_by_label("Select all 50 shown")).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1440


def test_views_are_kept_and_keys_move_and_jump(varied: Running, browser: Browser) -> None:
    """A view is one click in the next visit; "/", j, k and Ctrl-K need no pointer."""
    with watched(browser, varied.url) as opened:
        page = opened.open("/tunings?project=vision")
        page.get_by_role("button", name="Save this view").click()
        page.get_by_label("Name", exact=True).fill("Ours")
        page.keyboard.press("Enter")
        page = opened.open("/tunings")
        expect(rows(page)).to_have_count(6)
        page.get_by_role("link", name="Ours").click()
        expect(rows(page)).to_have_count(2)
        assert violations(page) == []
        page.get_by_role("button", name="Remove the view Ours").click()
        expect(page.get_by_role("link", name="Ours")).to_have_count(0)
        for key, row in (("j", 0), ("j", 1), ("k", 0)):
            page.keyboard.press(key)
            expect(rows(page).nth(row).get_by_role("link").first).to_be_focused()
        page.keyboard.press("/")
        expect(page.get_by_label("Search")).to_be_focused()
        page.keyboard.press("Control+k")
        page.get_by_role("textbox", name="Jump to").fill("vit")
        expect(page.get_by_role("dialog").get_by_role("link")).to_have_count(3)
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/tunings/tun_"))


# --- filters as chips ---


@pytest.fixture
def varied(start_service: StartService) -> Running:
    """A service with tunings of three states, two models, and two projects."""
    service = start_service()
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


def test_the_keyboard_adds_and_removes_filters(varied: Running, browser: Browser) -> None:
    """Delete and Enter remove a chip; the focus goes to the next one, then back to the fields."""
    with watched(browser, varied.url) as opened:
        page = opened.open("/tunings?project=vision&device=cpu&problem_code=nothing")
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        expect(chips(page)).to_have_count(3)
        page.get_by_role("button", name="Nothing fits").focus()
        for key in ("Tab", "Tab", "Tab"):
            page.keyboard.press(key)
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter Cause of failure: nothing")
        page.keyboard.press("Delete")
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter Requested device: cpu")
        expect(rows(page)).to_have_count(2)
        page.keyboard.press("Enter")
        expect(page.locator(":focus")).to_have_accessible_name("Remove the filter Project: vision")
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


@pytest.mark.thorough
def test_filters_of_the_address_are_shown_and_cleared_together(varied: Running, browser: Browser) -> None:
    """Also the time, and what no option offers is left out; all of them go with one click."""
    with watched(browser, varied.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open(
            "/tunings?state=FAILED&state=nothing&problem_code=workload-error&created_after=2100-01-02T03:04:05Z"
        )
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        expect(chips(page)).to_have_text(
            [re.compile(text) for text in ("Created after: .* Jan 2100", "Cause of failure: workload-error")]
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name=re.compile("Created after")).click()
        expect(rows(page)).to_have_count(1)
        page.reload()
        expect(rows(page)).to_have_count(1)
        remove(page, "Cause of failure: workload-error")
        page.get_by_role("button", name="Failed", exact=True).click()
        expect(rows(page)).to_have_count(6)
        expect(chips(page)).to_have_count(0)
        page.get_by_role("button", name="Filters").click()
        page.get_by_label("Filter by").select_option("Created after")
        page.get_by_label("Created after", exact=True).fill("2100-01-02T03:04")
        page.get_by_role("button", name="Add", exact=True).click()
        expect(page.get_by_text("No matches for these filters")).to_be_visible()


@pytest.mark.thorough
def test_projects_and_owners_lead_to_their_lists(varied: Running, browser: Browser) -> None:
    """A click on a row's project or owner filters the list by it."""
    new, text = make_key("night scheduler", (Scope.ADMIN,))
    varied.system.store.keys.add(new)
    with engine_at(varied.settings.url) as engine:
        fill(engine, 2, keys=(new.id,), state=State.CANCELLED)
    with watched(browser, varied.url) as opened:
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
