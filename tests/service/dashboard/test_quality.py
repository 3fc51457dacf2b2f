"""Every page in both themes: accessible, from one origin, small, and safe from hostile text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.errors import WorkloadError
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import mlp_spec, recommendation, tuning_request
from tests.support.service.browser import Watched, violations, watched, without_charts
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(2)</script>'</title>{{7*7}}"
WITHOUT_CHARTS = (
    "/",
    "/tunings",
    "/tunings/new",
    "/recommendations",
    "/jobs",
    "/devices/host/cpu",
    "/keys",
    "/webhooks",
    "{webhook}",
    "/audit",
    "{recommendation}",
    "{compare}",
)
WIDTHS = """() => Object.fromEntries(["1", "8", "i", "m"].map((letter) => {
    const cell = document.querySelector("td.number").cloneNode();
    const text = cell.appendChild(Object.assign(document.createElement("span"), { textContent: letter.repeat(20) }));
    document.querySelector("tbody tr").append(cell);
    const { width } = text.getBoundingClientRect();
    cell.remove();
    return [letter, width];
}))"""


@dataclass(frozen=True)
class PopulatedService:
    """A service with content on every page, and the paths of its pages."""

    service: Running
    paths: dict[str, str]


def ended(service: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A tuning or job that has ended."""
    made = service.http.post(path, json=body).json()
    found: dict[str, Any] = service.http.get(f"{path}/{made['id']}", params={"wait": 20}).json()
    assert found["state"] in {"SUCCEEDED", "FAILED"}, found
    return found


@pytest.fixture(scope="module")
def populated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PopulatedService]:
    """A service with content, whose charts are empty."""
    folder = tmp_path_factory.mktemp("pages")
    with without_charts(folder), _populated(folder / "data") as made:
        yield made


@pytest.fixture(scope="module")
def with_charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PopulatedService]:
    """A service with content."""
    with _populated(tmp_path_factory.mktemp("drawn")) as made:
        yield made


@contextmanager
def _populated(folder: Path) -> Iterator[PopulatedService]:
    """Tunings that fit and that fail, recommendations, a job; hostile text in every field that a caller controls."""
    runner = ScriptedRunner(37)
    runner.memory = MemoryInUse(used_bytes=5 * 2**30, own_bytes=2**30)
    with running(folder, runner, Trainer(), webhook_hosts=("http://hooks.example",)) as service:
        hook = {"url": "http://hooks.example/told", "name": HOSTILE[:100], "events": ["job.failed"]}
        webhook = service.http.post("/v1/webhooks", json=hook).json()["id"]
        hostile = {"kind": "transformers", "task": "causal-lm", "config": {"model_type": HOSTILE[:90]}}
        spec = mlp_spec(model=hostile, batch={"sequence_length": 8})
        fits = ended(service, "/v1/tunings", tuning_request(spec).model_dump(mode="json"))
        other = ended(service, "/v1/tunings", tuning_request(effective_batch_size=7).model_dump(mode="json"))
        runner.spec_error = WorkloadError(HOSTILE)
        failed = ended(service, "/v1/tunings", tuning_request(effective_batch_size=8).model_dump(mode="json"))
        runner.spec_error = None
        body = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 5}}
        job = ended(service, "/v1/jobs", body)
        one, two = fits["recommendation_id"], other["recommendation_id"]
        yield PopulatedService(
            service,
            {
                "{tuning}": f"/tunings/{fits['id']}",
                "{failed}": f"/tunings/{failed['id']}",
                "{recommendation}": f"/recommendations/{one}",
                "{compare}": f"/recommendations/compare?id={one}&id={two}",
                "{job}": f"/jobs/{job['id']}",
                "{webhook}": f"/webhooks/{webhook}",
            },
        )


def settled(opened: Watched, path: str) -> Page:
    """A page that has drawn what it shows."""
    page = opened.open(path)
    if path.startswith(("/tunings/tun", "/jobs/job")):
        expect(page.locator("#facts dt").first).to_be_visible()
    else:
        page.wait_for_load_state("networkidle")
    expect(page.locator("main")).not_to_contain_text("Loading")
    return page


def excused(opened: Watched) -> Watched:
    """The scripted trainer leaves no folder, so that a job's log and checkpoints are not there."""
    opened.excused = ("409",)
    return opened


# --- accessible -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_violates_wcag(
    browser: Browser, with_charts: PopulatedService, theme: Literal["light", "dark"]
) -> None:
    """Axe finds nothing of WCAG 2.2 AA; pages are not wider than the smallest screen; only this origin is asked."""
    pages = [*(path for path in WITHOUT_CHARTS if path.startswith("/")), *with_charts.paths.values()]
    with watched(browser, with_charts.service.url, color_scheme=theme) as opened:
        assert faults_of(excused(opened), pages) == {}


@pytest.mark.parametrize("name", ["/", "{tuning}", "{recommendation}"])
def test_a_usual_page_violates_no_wcag(browser: Browser, populated: PopulatedService, name: str) -> None:
    """Pages that every operator opens have no violation either."""
    with watched(browser, populated.service.url) as opened:
        assert faults_of(opened, [populated.paths.get(name, name)]) == {}


def faults_of(opened: Watched, pages: Sequence[str]) -> dict[str, list[Any]]:
    """Violations that axe finds, by page; every page fits on the smallest screen."""
    found = {}
    for path in pages:
        page = settled(opened, path)
        found[path] = violations(page)
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, path
        page.set_viewport_size({"width": 1280, "height": 900})
    return {path: faults for path, faults in found.items() if faults}


@pytest.mark.thorough
def test_the_sign_in_page_is_accessible(browser: Browser, tmp_path: Path) -> None:
    """With a key in the store, everything leads there."""
    with running(tmp_path, ScriptedRunner(37), Trainer()) as service:
        service.system.store.keys.add(make_key(HOSTILE, tuple(Scope))[0])
        with watched(browser, service.url) as opened:
            page = opened.open("/jobs")
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            assert violations(page) == []


def test_pages_work_with_the_keyboard_alone(browser: Browser, populated: PopulatedService) -> None:
    """The first stop leads past the navigation, every stop shows itself, and a dialog gives the focus back."""
    with watched(browser, populated.service.url) as opened:
        page = settled(opened, populated.paths["{tuning}"])
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        page.keyboard.press("Enter")
        expect(page.locator(":focus")).to_have_id("content")
        button = page.get_by_role("button", name="Delete")
        button.focus()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.locator(":focus")).to_have_text("Delete")


# --- hostile text ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_no_page_runs_hostile_text(browser: Browser, with_charts: PopulatedService) -> None:
    """Names, messages and addresses of callers run nothing (a dialog or an error would fail)."""
    with watched(browser, with_charts.service.url) as opened:
        excused(opened)
        for path in ("/", "/tunings", "/recommendations", "/devices/host/cpu", *with_charts.paths.values()):
            page = settled(opened, path)
            assert page.locator("img, main script, main iframe").count() == 0, path


def test_hostile_text_is_escaped(browser: Browser, populated: PopulatedService) -> None:
    """Names, messages and addresses of callers show as they are, and run nothing."""
    with watched(browser, populated.service.url) as opened:
        page = settled(opened, populated.paths["{failed}"])
        expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
        page = settled(opened, "/tunings")
        expect(page.locator("table")).to_contain_text(HOSTILE[:90])
        page = settled(opened, f"/tunings?model={HOSTILE}&state=javascript:alert(1)")
        assert page.locator("img").count() == 0


@pytest.mark.thorough
def test_a_hostile_next_page_is_ignored(browser: Browser, tmp_path: Path) -> None:
    """Whatever `next` says, who signs in stays on this service."""
    with running(tmp_path, ScriptedRunner(37), Trainer()) as service:
        new, text = make_key(HOSTILE, tuple(Scope))
        service.system.store.keys.add(new)
        with watched(browser, service.url) as opened:
            page = opened.open("/sign-in?next=//example.org/")
            page.get_by_label("API key").fill(text)
            page.get_by_role("button", name="Sign in").click()
            expect(page).to_have_url(service.url + "/")
            page = settled(opened, "/keys")
            expect(page.locator("main")).to_contain_text(HOSTILE)
            assert page.locator("img").count() == 0


# --- light and quick ------------------------------------------------------------------------------------------------


def transferred(page: Page, path: str) -> tuple[int, int]:
    """Bytes that a page costs over the wire with nothing cached, API calls included: without the font, and of it."""
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    received: dict[str, float] = {}
    fonts: set[str] = set()

    def on_request(message: dict[str, Any]) -> None:
        if message["request"]["url"].endswith(".woff2"):
            fonts.add(message["requestId"])

    session.on("Network.requestWillBeSent", on_request)
    session.on(
        "Network.loadingFinished",
        lambda message: received.update({message["requestId"]: message["encodedDataLength"]}),
    )
    page.goto(path, wait_until="networkidle")
    session.detach()
    of_fonts = sum(size for request, size in received.items() if request in fonts)
    return int(sum(received.values()) - of_fonts), int(of_fonts)


@pytest.mark.parametrize("pages", [("/tunings",), pytest.param(WITHOUT_CHARTS, marks=pytest.mark.thorough)])
def test_pages_without_a_chart_are_light(browser: Browser, with_charts: PopulatedService, pages: Sequence[str]) -> None:
    """Under 100 KB each, everything counted but the API's document that the form is made from, and the font of all."""
    weights = {}
    for name in pages:
        path = with_charts.paths.get(name, name)
        with watched(browser, with_charts.service.url) as opened:
            weights[name] = transferred(opened.page, opened.url + path)
    assert {name: weight for name, (weight, _) in weights.items() if weight >= 100_000} == {}
    assert all(0 < font < 31_000 for _, font in weights.values())


@pytest.mark.thorough
def test_figures_are_set_in_our_font(browser: Browser, populated: PopulatedService) -> None:
    """The font comes from this origin, is there before the first paint or not shown, and its figures have one width."""
    with watched(browser, populated.service.url) as opened:
        settled(opened, "/tunings")
        page = settled(opened, "/tunings")
        faces = page.evaluate("[...document.fonts].map((face) => [face.family, face.status, face.display])")
        assert ["Geist", "loaded", "optional"] in faces
        widths = page.evaluate(WIDTHS)
        assert widths["1"] == widths["8"] > 0
        assert widths["i"] < widths["m"]
