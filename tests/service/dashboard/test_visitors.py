"""The pages in a real browser for visitors who come from elsewhere, may read little, or come back to a job."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, Page, expect

from service.domain.api_keys import Scope, make_key
from tests.support.service.browser import watched
from tests.support.service.running import Running

ID = "0" * 32
READING = [
    "/",
    f"/tunings/tun_{ID}",
    "/recommendations",
    f"/recommendations/compare?id=rec_{ID}&id=rec_{'1' * 32}",
    f"/recommendations/rec_{ID}",
]


def sign_in(page: Page, service: Running, *scopes: Scope) -> None:
    """As whoever has a new key of these scopes."""
    new, text = make_key("visitor", scopes)
    service.system.store.keys.add(new)
    page.goto(f"{service.url}/sign-in")
    page.get_by_label("API key").fill(text)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{service.url}/")


def test_a_link_of_another_site_opens_its_page(service: Running, browser: Browser) -> None:
    """Who is signed in sees it at once, though the browser sends no cookie along the link."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.JOBS_READ)
        elsewhere = service.url.replace("127.0.0.1", "elsewhere.example")
        link = f'<a href="{service.url}/jobs?state=FAILED">see</a>'
        opened.page.route(f"{elsewhere}/**", lambda route: route.fulfill(body=link, content_type="text/html"))
        opened.page.goto(elsewhere)
        opened.page.get_by_role("link").click()
        expect(opened.page).to_have_url(re.compile(r"127\.0\.0\.1:\d+/jobs\?state=FAILED$"))
        expect(opened.page.locator("h1")).to_have_text("Jobs")
        opened.excused = ("foreign request: http://elsewhere.example",)


def test_a_key_for_jobs_sees_which_scope_other_pages_need(service: Running, browser: Browser) -> None:
    """No page makes a call that the API would refuse: each names the scope (a 403 would fail the test)."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.JOBS_READ)
        for path in READING:
            page = opened.open(path)
            expect(page.locator("main .alert")).to_contain_text("tunings:read")
        expect(opened.open("/").locator("#running")).to_contain_text("Nothing is running")


def test_a_filled_form_survives_an_expired_session(service: Running, browser: Browser) -> None:
    """Whose session has ended signs in again, and finds the form as it was; the next visitor of the tab does not."""
    with watched(browser, service.url) as opened:
        opened.excused = ("401",)
        sign_in(opened.page, service, Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)
        page = opened.open("/tunings/new")
        page.get_by_role("button", name="a small GPT").click()
        page.get_by_label("Effective batch size").fill("123")
        page.context.clear_cookies()
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(re.compile(r"/sign-in\?next="))
        new, text = make_key("again", (Scope.TUNINGS_READ, Scope.TUNINGS_WRITE))
        service.system.store.keys.add(new)
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(f"{service.url}/tunings/new")
        expect(page.get_by_label("Effective batch size")).to_have_value("123")
        expect(page.locator("#preview")).to_contain_text('"gpt"')
        page.reload()
        expect(page.get_by_label("Effective batch size")).to_have_value("")


def test_escape_does_not_lose_a_new_key(service: Running, browser: Browser) -> None:
    """It is shown once: only the button that says so closes it."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.ADMIN)
        page = opened.open("/keys")
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Name").fill("night shift")
        page.get_by_role("button", name="Create the key").click()
        expect(page.get_by_text("Copy it now")).to_be_visible()
        for _ in range(3):
            page.keyboard.press("Escape")
        expect(page.get_by_text("Copy it now")).to_be_visible()
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_text("Copy it now")).to_have_count(0)
