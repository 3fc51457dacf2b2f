"""The forms of a tuning (presets, adapters, estimates) and of a registered command (its arguments' schema)."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from playwright.sync_api import Browser, Page, expect

from batchwright.client.documents.work import TuningSubmission
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.training import CommandProgress, RunOutcome, TrainingResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.launching.run_directory import RunPaths
from batchwright.workloads.build import check_workload
from batchwright_service.dashboard.new_tuning import presets
from batchwright_service.worker.executors.base import GraceSeconds, OnProgress, TrainingRun
from tests.support.factories import CUDA
from tests.support.service.browser import violations, watched
from tests.support.service.conformance_service import estimated
from tests.support.service.registered import DEFINITION, commands_file, submission
from tests.support.service.running import Running, StartService

HUNDREDS = 300
PRESETS = {name: request for family in presets().values() for name, request in family.items()}


def preview(page: Page) -> Any:
    """The body that the form would send."""
    return json.loads(page.locator("#preview code").inner_text())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_request_of_a_known_model(name: str) -> None:
    """It is valid and can be built, and transformers has the architecture, with every field of the config."""
    request = TuningSubmission.model_validate_json(json.dumps(PRESETS[name]), strict=True)
    config = dict(PRESETS[name]["spec"]["model"]["config"])
    known = transformers.AutoConfig.for_model(config.pop("model_type"))
    assert [field for field in config if not hasattr(known, field)] == []
    assert request.effective_batch_size > 1
    assert isinstance(request.spec, WorkloadSpec)
    check_workload(request.spec)


def test_a_new_tuning_asks_three_questions(service: Running, browser: Browser) -> None:
    """A field for each of model, batch and card is all that is open; a field that is wrong opens what it is in."""
    with watched(browser, service.url) as opened:
        opened.excused = ("422",)
        page = opened.open("/tunings/new")
        expect(page.locator("#form h2")).to_have_text(["1. Which model?", "2. Which batch?", "3. Which device?"])
        fields = page.locator("#form :is(input, select, textarea):visible")
        expect(fields).to_have_count(3)
        page.get_by_role("button", name="Submit the tuning").click()
        expect(page.locator(":focus")).to_have_attribute("aria-invalid", "true")
        page.get_by_label("Device", exact=True).select_option("cpu")
        page.get_by_label("Model from the presets").select_option("GPT-2, 124 million")
        expect(page.get_by_label("Device", exact=True)).to_have_value("cpu")
        expect(page.get_by_text("Describe the model: gpt2")).to_be_visible()
        expect(page.get_by_text("The largest sample: sequence length 1,024")).to_be_visible()
        page.get_by_role("button", name="GPT-2 on any H100").click()
        expect(page.get_by_label("Device", exact=True)).to_have_value("")
        assert preview(page)["hardware"]["gpu"].startswith("H100")
        assert "device" not in preview(page)


@pytest.mark.usefixtures("no_charts")
def test_an_estimate_follows_the_form(start_service: StartService, browser: Browser) -> None:
    """It is asked for once the typing pauses; a change cancels it and asks again; submitting does not wait for it."""
    service = start_service(device=CUDA.model_copy(update={"name": "NVIDIA L4", "total_bytes": 24 * 2**30}))
    asked: list[int | None] = []
    ended: list[int | None] = []

    def held(request: EstimateRequest, should_stop: Callable[[], bool]) -> Estimate:
        asked.append(size := request.effective_batch_size)
        while size != HUNDREDS and not should_stop():
            threading.Event().wait(0.01)
        ended.append(size)
        return estimated(request, should_stop)

    service.system.context.estimates._estimator = held
    with watched(browser, service.url) as opened:
        page = opened.open("/tunings/new")
        shown, batch = page.locator("#estimated"), page.get_by_label("Effective batch size")
        page.get_by_label("Model from the presets").select_option("GPT-2, 124 million")
        page.get_by_label("Device", exact=True).select_option("cuda:0: NVIDIA L4, 24.0 GiB")
        expect(shown).to_contain_text("Estimating what fits on L4")
        batch.fill("")
        batch.press_sequentially(str(HUNDREDS))
        expect(shown).to_contain_text("fits L4: largest micro-batch size 1")
        assert (asked, ended) == ([512, HUNDREDS], [512, HUNDREDS])
        batch.fill("37")
        expect(shown).to_contain_text("Estimating what fits on L4")
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(re.compile(r"/tunings/tun_"))


# --- registered commands ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The operator's file, whose command takes the number of updates."""
    return commands_file(tmp_path / "operator", argv=[*DEFINITION["argv"], "--updates={updates}"])


@pytest.fixture
def registered(start_service: StartService, file: Path) -> Running:
    """A service with one registered command."""
    return start_service(commands=file)


def opened_form(page: Page) -> None:
    """Choose a registered command."""
    page.get_by_label("Effective batch size").fill("60")
    page.get_by_label("Workload", exact=True).select_option("command")


@pytest.mark.thorough
def test_a_command_is_tuned_from_its_form(registered: Running, browser: Browser) -> None:
    """Fields, defaults and bounds are those that the operator registered; the pages after it show the command."""
    with watched(browser, registered.url) as opened:
        page = opened.open("/tunings/new")
        opened_form(page)
        expect(page.get_by_label("Effective batch size")).to_have_value("60")
        expect(page.get_by_text("From 1 to 64.")).to_be_visible()
        assert violations(page) == []
        expect(page.locator("#estimated")).to_have_count(0)
        page.get_by_label("Width").fill("12")
        page.get_by_label("Packing").check()
        page.get_by_label("Note").select_option("hold")
        expect(page.locator("#preview")).to_contain_text('"name": "wide"')
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(re.compile(r"/tunings/tun_"))
        expect(page.locator("#state .badge")).to_have_text("Succeeded")
        expect(page.locator("#facts")).to_contain_text("width: 12, rate: 0.1, note: hold, packing: true")
        first = page.url
        page.get_by_role("link", name="Repeat").click()
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(lambda url: "/tunings/tun_" in url and url != first)
        expect(page.locator("#state .badge")).to_have_text("Succeeded")
        page.get_by_role("link", name="Export").click()
        expect(page.locator("#gpus")).to_contain_text("only a run shows its memory")
        expect(page.locator("#exported")).to_contain_text("--width=12")
        expect(page.locator("#exported")).to_contain_text("--updates=100")
        page.get_by_label("Updates").fill("7")
        page.get_by_label("Job name").fill("wide")
        expect(page.locator("#exported")).to_contain_text("--updates=7")
        for absent in ("Script", "Devices per node", "Arguments of"):
            expect(page.get_by_label(absent)).not_to_be_visible()
        one, other = (row["id"] for row in registered.http.get("/v1/recommendations").json()["items"])
        opened.open(f"/recommendations/compare?id={one}&id={other}")
        expect(page.get_by_text("wide: width 12, rate 0.1").first).to_be_visible()
        opened.open("/recommendations")
        expect(page.get_by_role("cell", name="wide").first).to_be_visible()


def command_in_steps(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
    """A command whose counted updates are two in a step, and that ends with a note."""
    del grace_seconds
    for update in (2, 4):
        made = CommandProgress(update=update, updates=run.request.updates, samples_seen=30 * update, peak_bytes=2**28)
        on_progress([made])
    paths = RunPaths(run.directory)
    paths.log.write_text("the output of the program")
    return TrainingResult(
        outcome=RunOutcome.SUCCEEDED,
        message="ended",
        updates=4,
        exit_status=0,
        notes=("an update was unlike",),
    )


@pytest.mark.thorough
def test_a_command_is_run_from_its_recommendation(start_service: StartService, browser: Browser, file: Path) -> None:
    """The dialog asks for updates alone; the page of the job has the counted updates, the peak, the log and notes."""
    service = start_service(trainer=command_in_steps, commands=file)
    made = service.http.post("/v1/tunings", json=submission(width=12)).json()
    found = service.http.get(f"/v1/tunings/{made['id']}", params={"wait": 60}).json()["recommendation"]
    with watched(browser, service.url) as opened:
        page = opened.open(f"/recommendations/{found['id']}")
        page.get_by_role("button", name="Train").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("textbox")).to_have_count(1)
        dialog.get_by_label("Updates").fill("4")
        dialog.get_by_role("button", name="Show the command").click()
        expect(dialog.get_by_text("train recommendation.json --output-dir . --updates 4")).to_be_visible()
        assert violations(page) == []
        dialog.get_by_role("button", name="Start training").click()
        page.wait_for_url(re.compile(r"/jobs/job_"))
        expect(page.locator("#state .badge")).to_have_text("Succeeded")
        expect(page.locator("#progress")).to_contain_text("4 of 4 updates")
        expect(page.locator("#newest")).to_contain_text("256 MiB of 400 MiB")
        expect(page.locator("#answer")).to_contain_text("Trained for 4 updates: 120 samples")
        expect(page.locator("#memory .main-svg").first).to_be_visible()
        expect(page.locator("#log")).to_have_text("the output of the program")
        expect(page.locator("#notices")).to_contain_text("an update was unlike")
        for absent in ("#loss", "#learning-rate", "#checkpoints"):
            expect(page.locator(absent)).to_be_hidden()
        assert violations(page) == []


def test_a_wrong_argument_is_shown_beside_its_field(registered: Running, browser: Browser) -> None:
    """With the bounds of the operator."""
    with watched(browser, registered.url) as opened:
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


def test_a_pasted_spec_chooses_the_form_of_its_kind(registered: Running, browser: Browser) -> None:
    """And an example goes back to a workload that is described."""
    with watched(browser, registered.url) as opened:
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


@pytest.mark.thorough
def test_without_commands_the_form_has_no_choice(start_service: StartService, browser: Browser) -> None:
    """Nor a field that does nothing."""
    with watched(browser, start_service().url) as opened:
        page = opened.open("/tunings/new")
        expect(page.get_by_label("Effective batch size")).to_be_visible()
        expect(page.get_by_label("Workload", exact=True)).to_have_count(0)
