"""The order and the columns of lists in a real browser, kept in the page's address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.service.dashboard.test_quality import AXE, VIOLATIONS, WCAG
from tests.support.factories import tuning_request
from tests.support.service.browser import watched
from tests.support.service.running import Running
from tests.support.service.stores import engine_at, fill

SIZES = [6, 100, 37]


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


def test_a_text_is_searched_while_it_is_typed(service: Running, browser: Browser) -> None:
    """The space between two words stays when the first word is applied."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings")
        expect_order(page, *reversed(SIZES))
        page.get_by_label("Search").press_sequentially("run ")
        expect(page).to_have_url(re.compile(r"\?q=run$"))
        page.get_by_label("Search").press_sequentially("no-37")
        expect(page).to_have_url(re.compile(r"\?q=run\+no-37$"))
        expect_order(page, 37)


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


AFTER_A_CHANGE = """
async (after) => {
  const { makePages } = await import(new URL("pagination.js", document.querySelector('script[src*="/lists.js"]').src));
  let rows = ["a", "b", "c", "d"];
  const read = async (cursor, limit) => {
    const found = rows.slice(cursor === null ? 0 : rows.indexOf(cursor) + 1).slice(0, limit);
    return { items: found.map((id) => ({ id })), next_cursor: found.at(-1) === rows.at(-1) ? null : found.at(-1) };
  };
  const pages = makePages(read, { size: 2, isNewestFirst: false });
  await pages.refresh(() => true);
  await pages.load();
  rows = after;
  await pages.refresh(() => true);
  const shown = pages.rows().map(({ id }) => id);
  while (pages.hasOlder()) {
    await pages.load();
  }
  return [shown, pages.rows().map(({ id }) => id)];
}
"""
"""The rows of a sorted list of two loaded pages after a change, and those after all further pages were loaded."""


@pytest.mark.parametrize(
    ("after", "shown"),
    [("axbcd", "axbcd"), ("xabcd", "xabcd"), ("xyabcd", "xy"), ("bacd", "bacd"), ("acd", "acd"), ("abcd", "abcd")],
)
def test_new_rows_push_none_out_of_a_sorted_list(service: Running, browser: Browser, after: str, shown: str) -> None:
    """Rows pushed off the first page stay, also when a new one became its last; else they are loaded again."""
    with watched(browser, service.url) as opened:
        found = opened.open("/tunings").evaluate(AFTER_A_CHANGE, list(after))
    assert ["".join(ids) for ids in found] == [shown, after]


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
    """Cards have no heads to click on; a list without an order to choose has none."""
    with watched(browser, service.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open("/tunings")
        page.get_by_label("Order").select_option("Effective batch, ascending")
        expect_order(page, 6, 37, 100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page = opened.open("/audit")
        expect(page.get_by_role("combobox", name="Action")).to_be_visible()
        expect(page.get_by_label("Order")).to_have_count(0)


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
