"""Fixtures of the pages' tests: one browser for all modules that a process runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.service.browser import Pausable, pausable_chromium, without_charts
from tests.support.service.running import running
from tests.support.service.scripted import ScriptedRunner, Trainer


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pausable]:
    """A browser, which costs half a second to start and nothing while it has no page."""
    with running(tmp_path_factory.mktemp("first"), ScriptedRunner(37), Trainer()):
        pass  # the first service of a process makes the API's document, which takes longer than a test
    with pausable_chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(chromium: Pausable) -> Iterator[Browser]:
    """The browser, for a module of tests of pages."""
    with chromium.resumed() as opened:
        yield opened


@pytest.fixture
def no_charts(tmp_path: Path) -> Iterator[None]:
    """Leave the charts of the test's services empty."""
    with without_charts(tmp_path):
        yield
