"""A real browser for the tests of the pages: headless Chromium, and what went wrong in it."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

from batchwright_service.dashboard import assets

VARIABLE = "BATCHWRIGHT_TEST_CHROMIUM"
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first has no window, and takes a third less of the processor for the same pages."""
_ARGUMENTS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
_AXE = resources.files("axe_playwright_python").joinpath("axe.min.js")
_WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
_VIOLATIONS = """async (tags) => (await axe.run({runOnly: tags, resultTypes: ["violations"]})).violations.map(
    (rule) => [rule.id, rule.nodes.map((node) => node.html)])"""
TIMEOUT_MILLISECONDS = 60_000
"""Several times what a page takes on a busy machine. A failed expectation is silent for as long as this."""

expect.set_options(timeout=TIMEOUT_MILLISECONDS)


def _program() -> str:
    found = os.environ.get(VARIABLE) or next((path for name in _NAMES if (path := shutil.which(name))), None)
    assert found, f"no Chromium is installed; install the package `chromium-headless-shell`, or name one in {VARIABLE}"
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, started here and ended afterwards."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_program(), args=_ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Pausable:
    """A browser whose event loop runs in the thread of the tests only within ``resumed``.

    A test that starts a loop of its own, as ``asyncio.run`` does, fails in a thread where a loop runs.
    """

    browser: Browser
    loop: asyncio.AbstractEventLoop

    @contextmanager
    def resumed(self) -> Iterator[Browser]:
        """Run the loop until the end of the block."""
        asyncio._set_running_loop(self.loop)
        try:
            yield self.browser
        finally:
            asyncio._set_running_loop(None)


@contextmanager
def pausable_chromium() -> Iterator[Pausable]:
    """Start a browser and pause its loop."""
    with chromium() as browser:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield Pausable(browser, loop)
        asyncio._set_running_loop(loop)  # Playwright ends it


@contextmanager
def without_charts(folder: Path) -> Iterator[None]:
    """Leave the charts of services that start in the block empty: plotly.js takes two seconds of each page."""
    (stub := folder / assets.PLOTLY).write_text("globalThis.Plotly = { react() {} };")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assets, "_plotly_file", lambda: stub)
        yield


@dataclass
class Watched:
    """A page, and what it must not do: ask another origin, write errors to the console, open a dialog."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)
    excused: tuple[str, ...] = ()
    """Words of faults that the test brings about on purpose."""
    received_bytes: int = 0

    def open(self, path: str) -> Page:
        """Go to a page of the service."""
        self.page.goto(self.url + path)
        return self.page

    def check(self) -> None:
        """Fail where something happened that must not."""
        assert [fault for fault in self.faults if not any(words in fault for words in self.excused)] == []

    def on_request(self, request: Request) -> None:
        """Only this service is asked."""
        if urlsplit(request.url).scheme in {"http", "https"} and not request.url.startswith(self.url + "/"):
            self.faults.append(f"foreign request: {request.url}")

    def on_console(self, message: ConsoleMessage) -> None:
        """Nothing is wrong."""
        if message.type in {"error", "warning"}:
            self.faults.append(f"console: {message.text}")

    def on_response(self, response: Response) -> None:
        """Nothing that a page asks for is missing."""
        if response.status >= 400:
            self.faults.append(f"{response.status}: {urlsplit(response.url).path}")


@contextmanager
def watched(browser: Browser, url: str, **options: object) -> Iterator[Watched]:
    """A page in a context of its own, with its own cookies; checked at the end. ``options`` are Playwright's."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})  # type: ignore[arg-type] # its own names
    context.set_default_timeout(TIMEOUT_MILLISECONDS)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    made = Watched(context.new_page(), url)
    made.page.on("request", made.on_request)
    made.page.on("console", made.on_console)
    made.page.on("response", made.on_response)
    made.page.on("pageerror", lambda error: made.faults.append(f"page error: {error}"))
    made.page.on("dialog", lambda dialog: made.faults.append(f"dialog: {dialog.message}"))
    try:
        yield made
        made.check()
    finally:
        context.close()


def violations(page: Page) -> list[Any]:
    """Return what axe finds against WCAG 2.2 AA in a page: each rule with the elements that violate it."""
    if not page.evaluate("'axe' in globalThis"):
        page.evaluate(_AXE.read_text(encoding="utf-8"))
    found: list[Any] = page.evaluate(_VIOLATIONS, _WCAG)
    return found


class Modules:
    """The ES modules of the pages, imported into one open page of a service."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._folder = str(page.locator("script[type=module]").first.get_attribute("src")).rpartition("/")[0]

    def run(self, body: str, given: object = None) -> Any:
        """Return what the body of a JavaScript function returns.

        The body can use ``given``, ``load(name)`` for the exports of a module, ``place`` for an empty element of the
        page, and ``drawn()``, which resolves when Preact has drawn.
        """
        function = f"""async ([folder, given]) => {{
            const load = (name) => import(`${{folder}}/${{name}}.js`);
            const place = document.getElementById("content");
            (await load("preact-htm")).render(null, place);
            place.replaceChildren();
            const drawn = () => new Promise((resolve) => setTimeout(resolve));
            {body}
        }}"""
        return self.page.evaluate(function, [self._folder, given])
