"""The form of a registered command, made from the schema of its arguments, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.service.dashboard.test_quality import AXE, VIOLATIONS, WCAG
from tests.support.service.browser import chromium, watched
from tests.support.service.registered import commands_file
from tests.support.service.running import Running, StartService


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the module."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def service(start_service: StartService, tmp_path: Path) -> Running:
    """A service with one registered command."""
    return start_service(commands=commands_file(tmp_path / "operator"))


def opened_form(page: Page) -> None:
    """Choose a registered command."""
    page.get_by_label("Effective batch size").fill("60")
    page.get_by_label("Workload", exact=True).select_option("command")


def test_a_command_is_tuned_from_its_form(service: Running, browser: Browser) -> None:
    """Fields, defaults and bounds are those that the operator registered; the pages after it show the command."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        opened_form(page)
        expect(page.get_by_label("Effective batch size")).to_have_value("60")
        expect(page.get_by_text("From 1 to 64.")).to_be_visible()
        expect(page.get_by_role("button", name="Estimate first")).to_be_hidden()
        page.get_by_label("Width").fill("12")
        page.get_by_label("Packing").check()
        page.get_by_label("Note").select_option("hold")
        expect(page.locator("#preview")).to_contain_text('"name": "wide"')
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(re.compile(r"/tunings/tun_"))
        expect(page.locator("#state .badge")).to_have_text("✓Succeeded")
        expect(page.locator("#facts")).to_contain_text("width: 12, rate: 0.1, note: hold, packing: true")
        page.get_by_role("button", name="Repeat").click()
        expect(page.locator("#state .badge")).to_have_text("✓Succeeded")
        page.get_by_role("link", name="Recommendation and exports").click()
        expect(page.locator("#gpus")).to_contain_text("only a run shows its memory")
        expect(page.get_by_role("button", name="Train")).to_have_count(0)
        expect(page.locator("#exported")).to_contain_text("--width=12")
        one, other = (row["id"] for row in service.http.get("/v1/recommendations").json()["items"])
        opened.open(f"/recommendations/compare?id={one}&id={other}")
        expect(page.get_by_text("wide: width 12, rate 0.1").first).to_be_visible()
        opened.open("/recommendations")
        expect(page.get_by_role("cell", name="wide").first).to_be_visible()


def test_a_wrong_argument_is_shown_beside_its_field(service: Running, browser: Browser) -> None:
    """With the bounds of the operator."""
    with watched(browser, service.url) as opened:
        opened.excused = ("422",)
        page = opened.open("/tunings/new")
        opened_form(page)
        page.get_by_label("Rate").fill("7")
        page.get_by_role("button", name="Submit the tuning").click()
        expect(page.locator('[data-path="spec.model.arguments.rate"] .field-error')).to_have_text(
            "must be at most 1.0 (allowed: from 1e-06 to 1.0)"
        )
        expect(page.locator('[data-path="spec.model.arguments.width"] .field-error')).to_have_text("is required")
        expect(page.get_by_label("Width")).to_be_focused()


def test_a_pasted_spec_chooses_the_form_of_its_kind(service: Running, browser: Browser) -> None:
    """And an example goes back to a workload that is described."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        page.get_by_text("Paste a spec as YAML or JSON").click()
        page.get_by_label("A spec, or a whole request").fill(
            "model: {kind: command, name: wide, arguments: {width: 7, packing: true, depth: 1}}"
        )
        page.get_by_role("button", name="Fill the form").click()
        expect(page.get_by_label("Width")).to_have_value("7")
        expect(page.get_by_label("Packing")).to_be_checked()
        expect(page.locator("#paste-problem")).to_contain_text("spec.model.arguments.depth: is not a known field")
        page.get_by_role("button", name="a small GPT").click()
        expect(page.get_by_label("Workload", exact=True)).to_have_value("described")
        expect(page.get_by_label("Effective batch size")).to_have_value("256")


def test_without_commands_the_form_has_no_choice(start_service: StartService, browser: Browser) -> None:
    """Nor a field that does nothing."""
    with watched(browser, start_service().url) as opened:
        page = opened.open("/tunings/new")
        expect(page.get_by_label("Effective batch size")).to_be_visible()
        expect(page.get_by_label("Workload", exact=True)).to_have_count(0)


def test_the_form_of_a_command_is_accessible(service: Running, browser: Browser) -> None:
    """By the rules of axe."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        opened_form(page)
        page.evaluate(AXE)
        assert page.evaluate(VIOLATIONS, WCAG) == []
