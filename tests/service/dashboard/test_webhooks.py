"""The pages of webhooks in a real browser, with a receiver that listens: register, try, rotate, send again, delete."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from standardwebhooks.webhooks import Webhook

from batchwright.client.documents.api_keys import Scope
from batchwright_service.domain.key_texts import make_key
from tests.support.service.browser import violations, watched
from tests.support.service.receiver import Receiver, receiving, status
from tests.support.service.running import Running, StartService


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that accepts what it gets."""
    with receiving() as opened:
        yield opened


@pytest.fixture
def service(start_service: StartService, receiver: Receiver) -> Running:
    """A service that may deliver to the receiver, and gives up after one attempt."""
    return start_service(
        webhook_hosts=(receiver.host,),
        webhook_networks=("127.0.0.0/8",),
        webhook_attempts=1,
        webhook_first_pause_seconds=0.05,
    )


def secret(page: Page) -> str:
    """The secret that the dialog shows; then it is closed."""
    dialog = page.get_by_role("dialog")
    found = dialog.locator("figure.code code").inner_text()
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name="Done").click()
    expect(dialog).to_have_count(0)
    return found


def deliveries(page: Page) -> Locator:
    """The rows of the deliveries."""
    return page.locator(".list tbody tr")


def test_a_webhook_is_registered_and_tried(service: Running, receiver: Receiver, browser: Browser) -> None:
    """By the keyboard alone; the shown secret verifies messages as the library of Standard Webhooks does."""
    with watched(browser, service.url) as opened:
        page = opened.open("/webhooks")
        expect(page.get_by_text("No webhooks yet")).to_be_visible()
        page.get_by_role("button", name="New webhook").press("Enter")
        expect(page.get_by_label("Address")).to_be_focused()
        assert violations(page) == []
        page.keyboard.type(receiver.url)
        page.keyboard.press("Tab")
        page.keyboard.type("pager")
        page.keyboard.press("Enter")
        shown = secret(page)
        page.get_by_role("link", name="pager").press("Enter")
        expect(page.get_by_text("No messages yet")).to_be_visible()
        page.get_by_role("button", name="Send a test message").press("Enter")
        expect(deliveries(page)).to_have_text(re.compile("Delivered"))
        assert violations(page) == []
        Webhook(shown).verify(receiver.received[0].body, dict(receiver.received[0].headers))


def test_a_secret_is_rotated_and_a_webhook_deleted(service: Running, receiver: Receiver, browser: Browser) -> None:
    """By the keyboard alone; messages are then signed with the new secret."""
    made = service.http.post("/v1/webhooks", json={"url": receiver.url}).json()
    with watched(browser, service.url) as opened:
        page = opened.open(f"/webhooks/{made['id']}")
        page.get_by_role("button", name="Rotate the secret").press("Enter")
        page.get_by_label("The old secret ends").select_option("At once")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Rotate the secret").press("Enter")
        shown = secret(page)
        assert shown != made["secret"]
        page.get_by_role("button", name="Send a test message").press("Enter")
        expect(deliveries(page)).to_contain_text("Delivered")
        Webhook(shown).verify(receiver.received[0].body, dict(receiver.received[0].headers))
        page.get_by_role("button", name="Delete").press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Delete").press("Enter")
        expect(page).to_have_url(re.compile("/webhooks$"))
        expect(page.get_by_text("No webhooks yet")).to_be_visible()
    assert service.http.get("/v1/webhooks").json()["items"] == []


@pytest.mark.thorough
def test_what_was_given_up_is_found_and_sent_again(service: Running, receiver: Receiver, browser: Browser) -> None:
    """The list counts it, the page says why, and a filter finds it; then it is delivered."""
    receiver.replies[:] = [status(500), status(204)]
    made = service.http.post("/v1/webhooks", json={"url": receiver.url, "events": ["job.failed"]}).json()
    service.http.post(f"/v1/webhooks/{made['id']}/test")
    with watched(browser, service.url, viewport={"width": 360, "height": 740}) as opened:
        page = opened.open(f"/webhooks/{made['id']}")
        expect(deliveries(page)).to_contain_text("Given up")
        expect(deliveries(page)).to_contain_text("Status 500")
        page = opened.open("/webhooks")
        expect(page.get_by_text("1 given up")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("link", name=re.compile(r"127\.0\.0\.1")).click()
        page.get_by_role("combobox", name="State").select_option("Given up")
        page.get_by_label(re.compile("^Select msg")).check()
        page.get_by_role("button", name="Send again 1 message").click()
        expect(page.get_by_text("1 message being sent again")).to_be_visible()
        page.get_by_role("combobox", name="State").select_option("All")
        expect(deliveries(page)).to_contain_text("Delivered")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert len(receiver.received) == 2


def test_a_refused_address_stays_in_the_form(service: Running, browser: Browser) -> None:
    """The dialog names the field and keeps what was typed."""
    with watched(browser, service.url) as opened:
        opened.excused = ("422",)
        page = opened.open("/webhooks")
        page.get_by_role("button", name="New webhook").click()
        page.get_by_label("Address").fill("https://elsewhere.example/x")
        page.get_by_role("button", name="Create the webhook").click()
        expect(page.get_by_role("alert")).to_contain_text("BATCHWRIGHT_WEBHOOK_HOSTS")
        expect(page.get_by_label("Address")).to_have_value("https://elsewhere.example/x")


@pytest.mark.thorough
def test_without_an_allowed_host_the_page_names_the_setting(start_service: StartService, browser: Browser) -> None:
    """Nothing can be registered, and an unknown webhook says so."""
    with watched(browser, start_service().url) as opened:
        page = opened.open("/webhooks")
        expect(page.get_by_text("BATCHWRIGHT_WEBHOOK_HOSTS")).to_be_visible()
        expect(page.get_by_role("button", name="New webhook")).to_have_count(0)
        page = opened.open(f"/webhooks/whk_{'0' * 32}")
        expect(page.get_by_role("heading", name="No such webhook")).to_be_visible()


@pytest.mark.thorough
def test_webhooks_are_for_administrators(service: Running, browser: Browser) -> None:
    """Another key sees the scope that it lacks; its page asks the API for nothing."""
    new, text = make_key("reader", (Scope.TUNINGS_READ,))
    service.system.store.keys.add(new)
    with watched(browser, service.url) as opened:
        page = opened.open("/sign-in?next=/webhooks")
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("It needs the scope admin")).to_be_visible()
        expect(page.get_by_role("link", name="Webhooks")).to_have_count(0)
