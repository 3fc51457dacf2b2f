"""The form of a tuning: presets that are valid requests, an adapter of defaults, an estimate that is cancelled."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from playwright.sync_api import Browser, Page, Route, expect

from service.dashboard.new_tuning import presets
from service.domain.work import TuningSubmission
from tests.service.dashboard.test_quality import AXE, VIOLATIONS, WCAG
from tests.support.service.browser import watched
from tests.support.service.running import Running

PRESETS = {name: request for family in presets().values() for name, request in family.items()}


def preview(page: Page) -> Any:
    """The body that the form would send."""
    return json.loads(page.locator("#preview code").inner_text())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_request_of_a_known_model(name: str) -> None:
    """It is valid, and transformers has the architecture, with every field of the config."""
    request = TuningSubmission.model_validate_json(json.dumps(PRESETS[name]), strict=True)
    config = dict(PRESETS[name]["spec"]["model"]["config"])
    known = transformers.AutoConfig.for_model(config.pop("model_type"))
    assert [field for field in config if not hasattr(known, field)] == []
    assert request.effective_batch_size > 1


def test_a_preset_fills_the_form_with_all_of_it(service: Running, browser: Browser) -> None:
    """The form's request equals the preset, for each of them; the page stays accessible."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        for name, request in PRESETS.items():
            page.get_by_label("Model from the presets").select_option(name)
            expect(page.get_by_label("Effective batch size")).to_have_value(str(request["effective_batch_size"]))
            assert TuningSubmission.model_validate(preview(page)) == TuningSubmission.model_validate(request), name
        page.evaluate(AXE)
        assert page.evaluate(VIOLATIONS, WCAG) == []


def test_an_adapter_of_defaults_is_kept(service: Running, browser: Browser) -> None:
    """Choosing the kind is enough, and choosing none takes the adapter out again."""
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        page.get_by_label("Model from the presets").select_option("Llama 3, 8 billion")
        page.get_by_text("Optimizer, parallelism, data and other parts of the spec").click()
        kind = page.locator("#field-spec-adapter-kind")
        expect(kind).to_have_value("")
        assert "adapter" not in preview(page)["spec"]
        kind.select_option("lora")
        expect(page.locator("#preview code")).to_contain_text('"adapter"')
        assert preview(page)["spec"]["adapter"] == {"kind": "lora"}
        page.locator("#field-spec-adapter-rank").fill("16")
        expect(page.locator("#preview code")).to_contain_text("16")
        assert preview(page)["spec"]["adapter"] == {"kind": "lora", "rank": 16}
        kind.select_option("")
        expect(page.locator("#preview code")).not_to_contain_text('"adapter"')


def test_an_estimate_is_cancelled(service: Running, browser: Browser) -> None:
    """It says for how long it has been under way; a cancelled one leaves the form as it is."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        page.get_by_label("Model from the presets").select_option("GPT-2, 124 million")
        page.route("**/v1/estimates", hold)
        page.get_by_role("button", name="Estimate first").click()
        expect(page.get_by_role("progressbar", name="Estimate in progress")).to_be_visible()
        page.get_by_role("button", name="Cancel the estimate").press("Enter")
        expect(page.get_by_text("The estimate is cancelled.")).to_be_visible()
        expect(page.get_by_role("button", name="Estimate first")).to_be_enabled()
        expect(page.get_by_role("alert")).to_have_count(0)
        assert len(held) == 1
