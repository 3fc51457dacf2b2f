"""The page of a device: memory, running and waiting work, occupancy, recent work, failures and its host."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import CPU, tuning_request
from tests.support.service.asking import PATIENCE_SECONDS
from tests.support.service.browser import violations, watched
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import SERVED, ScriptedRunner, until_stopped
from tests.support.service.stores import engine_at, fill

CARD = CPU.model_copy(update={"id": "cuda:7", "kind": "cuda", "name": "A card"})
PATH = f"/devices/{SERVED.slot}"
PROBLEM = Problem(type="about:blank", title="It failed", detail="The loss is no tensor.", code="workload-error")
DAYS_AGO_MS = 3 * 86_400_000
HOUR_MS = 3_600_000


@pytest.fixture
def busy(start_service: StartService) -> Running:
    """A device of 16 GiB that runs a tuning, with one that waits and two that failed; another device of its host."""
    started = threading.Event()
    runner = ScriptedRunner(37, until_stopped(started))
    runner.memory = MemoryInUse(used_bytes=5 * 2**30, own_bytes=2**30)
    service = start_service(runner)
    assert CPU.total_bytes == 16 * 2**30
    with engine_at(service.settings.url) as engine:
        failed: dict[str, Any] = {"problem": PROBLEM.model_dump_json(), "problem_code": PROBLEM.code}
        failed |= {"state": State.FAILED, "slot": SERVED.slot, "device_ms": HOUR_MS}
        for ago_ms in (DAYS_AGO_MS, DAYS_AGO_MS + 24 * HOUR_MS):
            fill(engine, 1, ended_at=int(1000 * time.time()) - ago_ms, **failed)
        fill(engine, 1, state=State.FAILED, slot="elsewhere/cpu", ended_at=5)
    for size in (3, 5):
        body = tuning_request(effective_batch_size=size).model_dump(mode="json")
        service.http.post("/v1/tunings", json={**body, "name": f"of-{size}"}).raise_for_status()
    assert started.wait(PATIENCE_SECONDS)
    card = CPU.model_copy(update={"id": "cuda:0", "kind": "cuda", "name": "A card"})
    service.system.store.devices.announce(SERVED.model_copy(update={"slot": "host/cuda:0", "device": card}))
    return service


@pytest.fixture
def page(busy: Running, browser: Browser) -> Iterator[Page]:
    """Its page, by way of the overview."""
    with watched(browser, busy.url) as opened:
        found = opened.open("/")
        found.get_by_role("table", name="Devices").get_by_role("link", name="cpu", exact=True).click()
        found.wait_for_url(f"**{PATH}")
        expect(found.get_by_role("heading", name="cpu of host")).to_be_visible()
        yield found


def test_a_device_shows_its_memory_and_its_work(page: Page) -> None:
    """Ours, that of others and what is free add up; what runs and what waits are links."""
    expect(page.locator("#memory .figure-value")).to_have_text(["1.00 GiB", "4.00 GiB", "11.0 GiB"])
    expect(page.get_by_role("img", name=re.compile("^Of 16.0 GiB: Batchwright 1.00 GiB, Other"))).to_be_visible()
    expect(page.locator("#running").get_by_role("link", name="of-3")).to_be_visible()
    expect(page.locator("#queue tbody tr")).to_have_count(1)
    expect(page.locator("#worker")).to_contain_text("Alive")


def test_the_overview_shows_trends_and_cancels_what_waits(busy: Running, browser: Browser) -> None:
    """The columns of a period have words, a row of the queue leaves it, and a banner says why nothing moves."""
    busy.system.store.devices.announce(SERVED.model_copy(update={"slot": "host/cuda:7", "device": CARD}))
    with engine_at(busy.settings.url) as engine:
        fill(engine, 1, device=CARD.id)
    with watched(browser, busy.url) as opened:
        opened.excused = ("503",)
        page = opened.open("/")
        banner = page.get_by_role("alert").filter(has_text="The service is not ready")
        expect(banner).to_contain_text("A worker of cuda:7 is idle (1 waiting, ")
        page.get_by_role("button", name="7 days").click()
        expect(page.get_by_role("img", name=re.compile("^2 failures, by six hours, peak 1 "))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("^2 tunings, by six hours"))).to_be_visible()
        waiting = page.locator("#queue tbody tr").filter(has_text="of-5")
        waiting.get_by_role("button", name="Raise the priority of of-5").click()
        expect(waiting.get_by_role("cell", name="10", exact=True)).to_be_visible()
        waiting.get_by_role("button", name="Cancel of-5").click()
        page.get_by_role("button", name="Cancel it").click()
        expect(waiting).to_have_count(0)
        assert violations(page) == []


@pytest.mark.thorough
def test_a_device_shows_its_history(page: Page) -> None:
    """Work of days ago is in the week; recent work and failures are those of this device, with their messages."""
    strip = page.locator("#history").get_by_role("img")
    expect(strip).to_have_accessible_name(re.compile("of the last 24 hours"))
    page.get_by_role("button", name="7 days").press("Enter")
    expect(strip).to_have_accessible_name(re.compile(r"^Busy [1-9]\d?\.\d % of the last 7 days, last in the two hours"))
    expect(page.get_by_role("button", name="7 days")).to_be_focused()
    expect(page.locator("#history .keys")).to_contain_text("Tunings 2 h")
    expect(page.locator("#recent tbody tr")).to_have_count(3)
    failures = page.locator("#failures tbody tr")
    expect(failures).to_have_count(2)
    expect(failures.first).to_contain_text(PROBLEM.detail)
    page.get_by_role("link", name="All failed tunings").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("combobox", name="Device")).to_have_value("host/cpu")
    page.locator("tbody tr").first.get_by_role("link", name="cpu").click()
    page.wait_for_url(f"**{PATH}")


@pytest.mark.thorough
def test_a_device_leads_to_the_others_of_its_host(page: Page) -> None:
    """One whose worker reads no memory says so, and a tuning's page leads to its device."""
    page.locator("#host").get_by_role("link", name="cuda:0").click()
    expect(page.get_by_role("heading", name="cuda:0 of host")).to_be_visible()
    expect(page.locator("main")).to_contain_text("The worker cannot read how much of it is in use.")
    expect(page.locator("#running")).to_contain_text("Nothing is running")
    page.locator("#host").get_by_role("link", name="cpu").click()
    page.locator("#running").get_by_role("link", name="of-3").click()
    page.locator("#facts").get_by_role("link", name="host/cpu").click()
    page.wait_for_url(f"**{PATH}")


@pytest.mark.thorough
def test_a_device_that_no_worker_serves_keeps_its_history(busy: Running, browser: Browser) -> None:
    """The page says so, and lists what ran there."""
    with watched(browser, busy.url) as opened:
        page = opened.open("/devices/elsewhere/cpu")
        expect(page.get_by_text("No worker serves this device")).to_be_visible()
        expect(page.locator("#recent tbody tr")).to_have_count(1)
        expect(page.locator("#queue")).to_have_count(0)


@pytest.mark.thorough
def test_a_key_without_tunings_sees_no_device(service: Running, browser: Browser) -> None:
    """The page names the scope, and asks for nothing that would be refused."""
    new, text = make_key("jobs alone", (Scope.JOBS_READ,))
    service.system.store.keys.add(new)
    with watched(browser, service.url) as opened:
        page = opened.open(f"/sign-in?next={PATH}")
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("main")).to_contain_text("It needs the scope tunings:read")
