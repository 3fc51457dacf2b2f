"""The dialog that makes a job from a recommendation, in a real browser."""

import re
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.factories import mlp_spec, tuning_request
from tests.support.service.browser import Watched, violations, watched
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner


class WithEnvironment(ScriptedRunner):
    """Probes that ran with settings of the allocator, as on a real device."""

    def environment(self) -> dict[str, str]:
        """Of which one needs quoting."""
        return {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1 more"}


@pytest.fixture
def service(start_service: StartService) -> Running:
    """A service in which 37 samples fit."""
    return start_service(WithEnvironment(37))


@pytest.fixture
def recommendation_id(service: Running) -> str:
    """The id of a recommendation that can be trained with."""
    body = tuning_request(mlp_spec(data={"kind": "synthetic", "samples": 500})).model_dump(mode="json")
    made = service.http.post("/v1/tunings", json=body).json()
    found = service.http.get(f"/v1/tunings/{made['id']}", params={"wait": 60}).json()
    identifier: str = found["recommendation_id"]
    return identifier


def opened_dialog(opened: Watched, recommendation_id: str) -> tuple[Page, Locator]:
    """The page of the recommendation, and the dialog on it."""
    page = opened.open(f"/recommendations/{recommendation_id}")
    page.get_by_role("button", name="Train").click()
    dialog = page.get_by_role("dialog", name="Train with this recommendation")
    expect(dialog).to_be_visible()
    return page, dialog


def jobs(service: Running) -> list[dict[str, Any]]:
    """The jobs that the service has."""
    found: list[dict[str, Any]] = service.http.get("/v1/jobs").json()["items"]
    return found


@pytest.mark.thorough
def test_one_click_starts_no_training(service: Running, browser: Browser, recommendation_id: str) -> None:
    """The dialog opens on the number of updates; Escape closes it, and gives the focus back."""
    with watched(browser, service.url) as opened:
        page, dialog = opened_dialog(opened, recommendation_id)
        expect(dialog.get_by_label("Updates", exact=True)).to_be_focused()
        expect(dialog.get_by_label("Updates", exact=True)).to_have_value("100")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.get_by_role("button", name="Train")).to_be_focused()
        assert jobs(service) == []


def test_the_command_is_shown_before_anything_runs(service: Running, browser: Browser, recommendation_id: str) -> None:
    """Command, environment and files of the dry run for what is filled in; a change takes them away."""
    with watched(browser, service.url) as opened:
        _, dialog = opened_dialog(opened, recommendation_id)
        dialog.get_by_label("Updates", exact=True).fill("7")
        dialog.get_by_role("button", name="Show the command").click()
        expect(dialog.get_by_role("group", name="Command")).to_contain_text("batchwright.training.worker")
        expect(dialog).to_contain_text("Working directory")
        dialog.get_by_text("File training.json").click()
        expect(dialog.get_by_role("group", name="training.json")).to_contain_text('"updates": 7')
        body = {"recommendation_id": recommendation_id, "training": {"updates": 7}, "dry_run": True}
        configured = service.http.post("/v1/jobs", json=body).json()
        assert [file["path"] for file in configured["files"]] == ["recommendation.json", "training.json"]
        environment = dialog.get_by_role("group", name="Environment")
        expect(environment).to_contain_text("MALLOC_ARENA_MAX=1")
        expect(environment).to_contain_text("GLIBC_TUNABLES='glibc.malloc.hugetlb=1 more'")
        dialog.get_by_label("Seed").fill("3")
        expect(dialog.get_by_role("group", name="Command")).to_have_count(0)
        assert jobs(service) == []


@pytest.mark.usefixtures("no_charts")
def test_the_run_has_the_settings_of_the_form(service: Running, browser: Browser, recommendation_id: str) -> None:
    """With the keyboard alone: every setting reaches the job, and its page opens."""
    with watched(browser, service.url) as opened:
        opened.excused = ("409",)  # the scripted trainer leaves no folder to read a log from
        page, dialog = opened_dialog(opened, recommendation_id)
        for label, value in {"Updates": "7", "Checkpoint every": "2", "Keep checkpoints": "4", "Seed": "3"}.items():
            dialog.get_by_label(label, exact=True).fill(value)
        dialog.get_by_label("Workers", exact=True).fill("1")
        dialog.get_by_text("More settings").click()
        dialog.get_by_label("Trackers").fill("tensorboard")
        dialog.get_by_role("button", name="Start training").focus()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"/jobs/job_"))
        (job,) = jobs(service)
        training = service.http.get(f"/v1/jobs/{job['id']}").json()["training"]
        wanted = {"updates": 7, "checkpoint_every": 2, "keep_checkpoints": 4, "seed": 3, "workers": 1}
        assert {name: training[name] for name in wanted} == wanted
        assert training["trackers"] == ["tensorboard"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [pytest.param("many", "is not a number", marks=pytest.mark.thorough), ("0", "must be at least 1")],
)
def test_an_invalid_setting_is_marked_at_its_field(
    service: Running, browser: Browser, recommendation_id: str, typed: str, words: str
) -> None:
    """Input that the page or the service refuses is marked, focused and explained; no job is made."""
    with watched(browser, service.url) as opened:
        opened.excused = ("422",)
        _, dialog = opened_dialog(opened, recommendation_id)
        updates = dialog.get_by_label("Updates", exact=True)
        updates.fill(typed)
        dialog.get_by_role("button", name="Start training").click()
        expect(dialog.locator("[data-path='updates'] .field-error")).to_contain_text(words)
        expect(updates).to_be_focused()
        assert jobs(service) == []


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_dialog_is_accessible_and_fits(
    service: Running, browser: Browser, recommendation_id: str, theme: Literal["light", "dark"]
) -> None:
    """Axe finds nothing of WCAG 2.2 AA with the command shown, and a telephone shows it without scrolling sideways."""
    with watched(browser, service.url, color_scheme=theme, viewport={"width": 360, "height": 720}) as opened:
        page, dialog = opened_dialog(opened, recommendation_id)
        dialog.get_by_text("More settings").click()
        dialog.get_by_role("button", name="Show the command").click()
        expect(dialog.get_by_role("group", name="Command")).to_be_visible()
        assert violations(page) == []
        assert dialog.evaluate("(it) => it.scrollWidth <= it.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
