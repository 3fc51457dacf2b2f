"""Six questions of an operator, each answered on the pages in at most three clicks, as docs/operations.md says."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright.schemas.requests import Baseline
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import mlp_spec, tuning_request
from tests.support.service.browser import Watched, watched, without_charts
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer
from tests.support.service.stores import engine_at, fill

FAILURES = 3
PROBLEM = Problem(type="about:blank", title="It failed", detail="The loss is no tensor.", code="workload-error")
MOST_CLICKS = 3
PLAN = "4 \N{MULTIPLICATION SIGN} 32"


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A service after an upgrade of torch, with failures, a cancellation and a gain; and an administrator's key."""
    folder = tmp_path_factory.mktemp("operator")
    with without_charts(folder):
        yield from _upgraded(folder / "data")


def _upgraded(data: Path) -> Iterator[tuple[Running, str]]:
    with running(data, ScriptedRunner(37), Trainer(), torch="2.8") as before, before.client as client:
        baseline = Baseline(micro_batch_size=8, accumulation_steps=16)
        replacing = tuning_request(effective_batch_size=128, baseline=baseline)
        client.tunings.tune(replacing, name="llama-8b-nightly")
        client.tunings.tune(tuning_request(mlp_spec(precision="bf16"), 74), name="vit-weekly")
    with running(data, ScriptedRunner(37), Trainer(), torch="2.9") as service:
        with engine_at(service.settings.url) as engine:
            failure: dict[str, Any] = {"problem": PROBLEM.model_dump_json(), "problem_code": PROBLEM.code}
            fill(engine, FAILURES, state=State.FAILED, ended_at=int(1000 * time.time()), **failure)
            (waiting,) = fill(engine, 1, device="cuda:7")
        new, text = make_key("night operator", (Scope.ADMIN,))
        service.system.store.keys.add(new)
        headers = {"Authorization": f"Bearer {text}"}
        httpx.post(f"{service.url}/v1/tunings/{waiting}/cancel", headers=headers).raise_for_status()
        yield service, text


class Operator:
    """Somebody at the overview, whose clicks are counted. Text that is typed, or chosen in a field, is one too."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0

    def click(self, name: str) -> None:
        """Follow the first link of a name."""
        self._count(self.page.get_by_role("link", name=name, exact=True).first).click()

    def open_first(self) -> None:
        """Follow the link of the first row."""
        self._count(self.rows().first.get_by_role("link").first).click()

    def type(self, label: str, text: str) -> None:
        """Fill a field."""
        self._count(self.page.get_by_label(label, exact=True)).fill(text)

    def choose(self, label: str, option: str) -> None:
        """Choose an option."""
        self._count(self.page.get_by_role("combobox", name=label, exact=True)).select_option(option)

    def rows(self) -> Locator:
        """The rows of the list."""
        return self.page.locator("tbody tr")

    def _count(self, found: Locator) -> Locator:
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        return found


@pytest.fixture(scope="module")
def signed_in(upgraded: tuple[Running, str], browser: Browser) -> Iterator[Watched]:
    """The page of an administrator who has signed in."""
    service, text = upgraded
    with watched(browser, service.url) as opened:
        page = opened.open("/sign-in?next=/")
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        yield opened


@pytest.fixture
def operator(signed_in: Watched) -> Iterator[Operator]:
    """An administrator at the overview."""
    yield Operator(signed_in.open("/"))
    signed_in.check()


def test_which_models_waste_their_cards(operator: Operator) -> None:
    """The gain over what was used before, by model, leads to the plans of a model."""
    gains = operator.page.get_by_role("table", name="Gain over the baselines, by model")
    expect(gains.locator("tbody tr")).to_have_count(1)
    expect(gains.locator("tbody tr")).to_contain_text(re.compile(r"up by \d+ points"))
    operator.click("mlp")
    expect(operator.rows()).to_have_count(2)
    expect(operator.rows().filter(has_text="llama-8b-nightly")).to_contain_text(PLAN)


def test_why_did_that_fail_and_how_often(operator: Operator) -> None:
    """Causes are counted; a count leads to its failures, and each of these to its reason."""
    causes = operator.page.get_by_role("table", name="Failures by cause")
    expect(causes.locator("tbody tr")).to_contain_text(PROBLEM.detail)
    operator.click(str(FAILURES))
    expect(operator.rows()).to_have_count(FAILURES)
    expect(operator.page.get_by_text(f"Cause of failure: {PROBLEM.code}")).to_be_visible()
    operator.open_first()
    expect(operator.page.get_by_text(PROBLEM.detail)).to_be_visible()


def test_who_cancelled_it(operator: Operator) -> None:
    """The audit log names the key, and so does the tuning."""
    operator.click("Audit")
    operator.choose("Action", "cancelled")
    expect(operator.rows()).to_have_count(1)
    expect(operator.rows()).to_contain_text("night operator")
    operator.open_first()
    expect(operator.page.locator("#progress")).to_contain_text("Cancelled by night operator")


def test_who_signed_in(operator: Operator) -> None:
    """Sign-ins crowd no other act out of the audit log: it shows and counts them when asked."""
    operator.click("Audit")
    page, signed_in = operator.page, operator.rows().filter(has_text="signed in")
    total = page.locator(".total")
    expect(total).to_have_text(re.compile("^[1-9][0-9]* entries$"))
    expect(signed_in).to_have_count(0)
    before = total.inner_text()
    page.get_by_role("button", name="Show sign-ins").click()
    expect(signed_in).to_have_count(1)
    expect(total).not_to_have_text(before)


def test_is_the_card_in_use_now_and_was_it_last_night(operator: Operator) -> None:
    """The overview has both, without a click."""
    device = operator.page.get_by_role("table", name="Devices").locator("tbody tr")
    expect(device).to_contain_text("Free")
    expect(device.get_by_role("img")).to_have_accessible_name(re.compile("of the last 24 hours"))


def test_what_to_use_for_a_model_on_a_card(operator: Operator) -> None:
    """A search finds the plan; the device is a filter."""
    operator.click("Recommendations")
    expect(operator.rows()).to_have_count(2)
    operator.type("Search", "llama-8b")
    expect(operator.rows()).to_have_count(1)
    expect(operator.rows()).to_contain_text(PLAN)
    operator.click("llama-8b-nightly")
    expect(operator.page.get_by_role("heading", name=re.compile("Export"))).to_be_visible()


def test_did_the_upgrade_break_our_answers(operator: Operator) -> None:
    """Recommendations that another torch made are marked, and a filter has them alone."""
    operator.click("Recommendations")
    operator.choose("Still valid", "stale")
    expect(operator.rows()).to_have_count(2)
    expect(operator.rows().filter(has_text="torch 2.8 → 2.9")).to_have_count(2)
