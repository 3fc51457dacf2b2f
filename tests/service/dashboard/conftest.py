"""What the tests of the pages share: a browser for all modules that one process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.service.browser import Pausable, pausable_chromium


@pytest.fixture(scope="package")
def chromium() -> Iterator[Pausable]:
    """A browser, which costs half a second to start and nothing while it has no page."""
    with pausable_chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(chromium: Pausable) -> Iterator[Browser]:
    """The browser, for a module of tests of pages."""
    with chromium.resumed() as opened:
        yield opened
