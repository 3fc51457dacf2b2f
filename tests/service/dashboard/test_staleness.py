"""Recommendations that an upgrade put in doubt, on the pages, and the click that confirms one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.factories import tuning_request
from tests.support.service.browser import violations, watched
from tests.support.service.processes import wait_until
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer


@pytest.fixture
def upgraded(tmp_path: Path) -> Iterator[tuple[Running, list[str]]]:
    """A service with another torch than its two recommendations were made with, and their ids."""
    with running(tmp_path / "data", ScriptedRunner(37), Trainer(), torch="2.8") as before, before.client as client:
        names = [client.tunings.tune(tuning_request(effective_batch_size=size)).id for size in (74, 148)]
    with running(tmp_path / "data", ScriptedRunner(37), Trainer(), torch="2.9") as service:
        yield service, names


def test_stale_recommendations_are_marked_and_confirmed(upgraded: tuple[Running, list[str]], browser: Browser) -> None:
    """The list says what changed, and confirms those that are chosen."""
    service, names = upgraded
    with watched(browser, service.url) as opened:
        page = opened.open("/recommendations")
        expect(page.get_by_role("cell", name=re.compile("^stale .*torch 2.8 → 2.9"))).to_have_count(2)
        assert violations(page) == []
        page.get_by_label(re.compile("^Select all")).check()
        page.get_by_role("button", name="Confirm 2 recommendations").click()
        tunings = page.get_by_role("status").filter(has_text="2 recommendations being confirmed").get_by_role("link")
        expect(tunings).to_have_count(2)
        for link in tunings.all():
            tuning = str(link.get_attribute("href")).rpartition("/")[2]
            assert service.http.get(f"/v1/tunings/{tuning}", params={"wait": 20}).json()["state"] == "SUCCEEDED"
        wait_until(lambda: not service.http.get("/v1/recommendations", params={"stale": True}).json()["items"])
        page.get_by_role("combobox", name="Still valid").select_option("stale")
        expect(page.get_by_text("No matches for these filters")).to_be_visible()
        page.get_by_role("combobox", name="Still valid").select_option("valid")
        expect(page.locator("tbody tr").filter(has_text="valid")).to_have_count(4)
    assert len(service.runner.sizes) == len(names)


@pytest.mark.thorough
def test_the_page_of_a_stale_recommendation_confirms_it(upgraded: tuple[Running, list[str]], browser: Browser) -> None:
    """One click leads to the tuning of one probe; the page then says nothing of other conditions."""
    service, (name, _) = upgraded
    with watched(browser, service.url) as opened:
        page = opened.open(f"/recommendations/{name}")
        expect(page.get_by_text("torch 2.8 → 2.9")).to_be_visible()
        page.get_by_role("button", name="Confirm it").click()
        expect(page).to_have_url(re.compile("/tunings/tun_"))
        expect(page.locator(".page-head .badge")).to_contain_text("Succeeded")
        page.goto(f"{service.url}/recommendations/{name}")
        expect(page.get_by_role("heading", name="Train with")).to_be_visible()
        expect(page.get_by_text("Made under other conditions")).to_have_count(0)
    assert len(service.runner.sizes) == 1


@pytest.mark.thorough
def test_a_replaced_recommendation_is_not_confirmed_again(
    upgraded: tuple[Running, list[str]], browser: Browser
) -> None:
    """Its request has been tuned under today's conditions, and gave another plan."""
    service, (name, _) = upgraded
    service.runner.largest = 20
    with service.client as client:
        client.tunings.wait(client.recommendations.confirm(name).id)
    with watched(browser, service.url) as opened:
        page = opened.open("/recommendations")
        expect(page.get_by_role("cell", name=re.compile("stale replaced by"))).to_have_count(1)
        page.get_by_label(re.compile("^Select all")).check()
        expect(page.get_by_role("button", name="Confirm 1 recommendation")).to_be_visible()


def test_the_page_of_a_recommendation_survives_failures(upgraded: tuple[Running, list[str]], browser: Browser) -> None:
    """It asks again after an outage, and shows why a confirmation is refused below what changed."""
    service, (name, _) = upgraded
    refusal = {"title": "Nothing confirms it", "detail": "no live worker has it", "status": 409, "code": "x"}
    with watched(browser, service.url) as opened:
        opened.excused = ("503", "409")
        opened.page.route(re.compile("/staleness$"), lambda route: route.fulfill(status=503, json={}), times=1)
        opened.page.route(re.compile("/confirm$"), lambda route: route.fulfill(status=409, json=refusal))
        page = opened.open(f"/recommendations/{name}")
        page.get_by_role("button", name="Confirm it").click()
        expect(page.get_by_role("alert").filter(has_text="no live worker has it")).to_be_visible()
        expect(page.get_by_text("torch 2.8 → 2.9")).to_be_visible()
        expect(page.get_by_role("button", name="Confirm it")).to_be_enabled()


@pytest.mark.thorough
def test_a_confirmation_is_not_sent_again_while_the_page_leaves(
    upgraded: tuple[Running, list[str]], browser: Browser
) -> None:
    """The button stays disabled until the tuning's page is there."""
    service, (name, _) = upgraded
    with watched(browser, service.url) as opened:
        page = opened.open(f"/recommendations/{name}")
        page.route(re.compile("/tunings/tun_[0-9a-f]+$"), lambda route: route.fulfill(status=204))  # the page stays
        with page.expect_response(lambda response: response.status == 204):
            page.get_by_role("button", name="Confirm it").click()
        expect(page.get_by_role("button", name="Confirm it")).to_be_disabled()
