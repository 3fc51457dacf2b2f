"""The pages in a real browser: tunings of every outcome, watched live; comparing, exporting, signing in, recovering."""

import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from batchwright.client.documents.api_keys import Scope
from batchwright.errors import WorkloadError
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright_service.domain.key_texts import make_key
from tests.service.dashboard.test_modules import CPU_WORDS, TIMES
from tests.support.factories import mlp_spec, recommendation, tuning_request
from tests.support.service.browser import Watched, watched
from tests.support.service.processes import slow_service
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped

Open = Callable[..., Watched]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open pages of a service, each checked at the end."""
    with ExitStack() as stack:
        yield lambda service, **options: stack.enter_context(watched(browser, service.url, **options))


def tune(service: Running, **changes: Any) -> dict[str, Any]:
    """A tuning that has ended."""
    body = tuning_request(**changes).model_dump(mode="json") | {"fresh": True}
    made = service.http.post("/v1/tunings", json=body).json()
    found: dict[str, Any] = service.http.get(f"/v1/tunings/{made['id']}", params={"wait": 20}).json()
    return found


def submit(page: Page, effective_batch_size: int = 100) -> str:
    """Make a tuning with the form; gives its id once its page is there."""
    page.get_by_role("button", name="a small GPT").click()
    page.get_by_label("Effective batch size").fill(str(effective_batch_size))
    page.get_by_role("button", name="Submit the tuning").click()
    page.wait_for_url(re.compile(r"/tunings/tun_"))
    return page.url.rpartition("/")[2]


def state(page: Page) -> Any:
    """The badge that shows the state."""
    return page.locator("#state .badge")


def expect_answer(page: Page) -> None:
    """The first line of a page is the plan of a scripted runner of 37, and what is proven of it."""
    answer = page.locator("#answer")
    expect(answer.get_by_role("heading")).to_have_text(f"Train with 34 + 2 {TIMES} 33 (= 100 exactly)")
    expect(answer).to_contain_text("Proven: 37 fits, 38 does not.")


# --- a tuning of every outcome ---


@pytest.mark.usefixtures("no_charts")
def test_a_tuning_that_fits(service: Running, visit: Open) -> None:
    """From the form to the recommendation: plan, chart, probes, and the call that reproduces the tuning."""
    page = visit(service).open("/tunings/new")
    identifier = submit(page)
    expect(state(page)).to_have_text("Succeeded")
    expect_answer(page)
    expect(page.locator(".plan-piece")).to_have_text(["34", "33", "33"])
    recorded = service.http.get(f"/v1/tunings/{identifier}/probes").json()["items"]
    expect(page.locator("#probes tbody tr")).to_have_count(len(recorded))
    page.get_by_text("Reproduce").click()
    block = page.locator("figure.code", has_text="Over HTTP")
    block.get_by_role("button", name="Copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    body = json.loads(copied.partition(" -d '")[2].removesuffix("'"))
    assert body == service.http.get(f"/v1/tunings/{identifier}").json()["request"] | {"fresh": True}


def test_the_peaks_of_the_probes_are_drawn(service: Running, visit: Open) -> None:
    """By plotly.js, which nothing of the page's policy keeps from drawing."""
    small = {"width": 500, "height": 300}  # drawn by the processor
    page = visit(service, viewport=small).open(f"/tunings/{tune(service)['id']}")
    expect(page.locator("#chart .main-svg").first).to_be_attached()


@pytest.mark.usefixtures("no_charts")
def test_a_tuning_in_which_nothing_fits(start_service: StartService, visit: Open) -> None:
    """The recommendation names the reason, and has no exports; a button tries again with less memory."""
    service = start_service(ScriptedRunner(0))
    page = visit(service).open("/tunings/new")
    submit(page)
    expect(state(page)).to_have_text("Nothing fits")
    expect(page.locator("#answer")).to_contain_text("A micro-batch of 1 does not fit")
    first = page.url
    page.locator("#answer").get_by_role("link").click()
    expect(page.locator("#answer")).to_contain_text("Nothing fits")
    expect(page.locator("#exports")).to_be_hidden()
    page.get_by_role("button", name="Try with activation checkpointing").click()
    page.wait_for_url(lambda url: "/tunings/tun_" in url and url != first)
    again = service.http.get(f"/v1/tunings/{page.url.rpartition('/')[2]}").json()
    assert again["request"]["spec"]["activation_checkpointing"] is True


class Allocator(ScriptedRunner):
    """A device whose failures have the allocator's words: in the message, as older probes did, or ``apart``."""

    apart = False

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Answer from the formula."""
        result = super().run(request, should_stop)
        if result.outcome is Outcome.FIT:
            return result
        short = {"message": "asked for 2.00 MiB more in the warm-up", "details": CPU_WORDS}
        return result.model_copy(
            update=short if self.apart else {"message": f"out of memory in phase warmup: {CPU_WORDS}"}
        )


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_the_allocators_message_is_behind_details(start_service: StartService, visit: Open, *, apart: bool) -> None:
    """Headlines, the proof and the table have short words; the raw text is behind details."""
    runner = Allocator(37)
    runner.apart = apart
    page = visit(start_service(runner)).open("/tunings/new")
    submit(page)
    expect(page.locator("#proof")).to_contain_text("asked for 2.00 MiB more in the warm-up")
    failed = page.locator("#probes tbody tr", has_text="OOM").first
    expect(failed).to_contain_text("asked for 2.00 MiB more in the warm-up")
    raw = failed.get_by_text(CPU_WORDS)
    expect(raw).to_be_hidden()
    failed.get_by_text("Message of the allocator").click()
    expect(raw).to_be_visible()
    shown = page.evaluate("document.body.innerText")
    assert shown.count("enforce fail") == 1
    page.locator("#answer").get_by_role("link").last.click()
    page.wait_for_url(re.compile("/recommendations/"))
    expect(page.locator("#proof")).to_contain_text("asked for 2.00 MiB more in the warm-up")
    assert "enforce fail" not in page.locator("#proof").inner_text()


@pytest.mark.thorough
def test_a_bound_is_not_called_the_largest_that_fits(start_service: StartService, visit: Open) -> None:
    """The answer says where no larger size was tried."""
    runner = ScriptedRunner(500)
    service = start_service(runner)
    made = tune(service)
    page = visit(service).open(f"/tunings/{made['id']}")
    expect(page.locator("#answer")).to_contain_text("Larger sizes were not tried.")
    found = visit(service).open(f"/recommendations/{made['recommendation_id']}")
    expect(found.locator("#answer")).to_contain_text("Larger sizes were not tried.")
    runner.largest = 37
    page.goto(f"{service.url}/tunings/{tune(service)['id']}")
    expect_answer(page)


@pytest.mark.usefixtures("no_charts")
def test_a_tuning_that_is_answered_from_another(service: Running, visit: Open) -> None:
    """Its page has the probes of the other one, and a link to it."""
    body = tuning_request().model_dump(mode="json")
    source = tune(service)
    made = service.http.post("/v1/tunings", json=body | {"name": "again"}).json()
    page = visit(service).open(f"/tunings/{made['id']}")
    expect(page.locator("#probes tbody tr")).to_have_count(len(source["recommendation"]["evidence"]["probes"]))
    expect(page.locator("#source")).to_contain_text(f": {len(source['recommendation']['evidence']['probes'])} probes.")
    page.locator("#source").get_by_role("link").click()
    page.wait_for_url(re.compile(source["id"]))


@pytest.mark.usefixtures("no_charts")
def test_a_tuning_that_fails(start_service: StartService, visit: Open) -> None:
    """The page shows the cause, what else failed for it, and a form with the whole request, to repeat it."""
    runner = ScriptedRunner(37)
    runner.spec_error = WorkloadError("the loss is not a sum")
    service = start_service(runner)
    tune(service, effective_batch_size=7)
    names = {"name": "night", "project": "lm", "labels": {"team": "ops"}, "priority": -3}
    request = tuning_request(effective_batch_size=100, granularity=2).model_dump(mode="json") | names
    made = service.http.post("/v1/tunings", json=request).json()
    page = visit(service).open(f"/tunings/{made['id']}")
    expect(state(page)).to_have_text("Failed")
    expect(page.get_by_role("alert")).to_contain_text("The loss is not a sum")
    expect(page.get_by_text("2 tunings failed with this code.")).to_be_visible()
    runner.spec_error = None
    before = page.url
    page.get_by_role("link", name="Repeat").click()
    page.get_by_text("Advanced: name").click()
    expect(page.get_by_role("textbox", name="Name")).to_have_value("night")
    assert len(service.http.get("/v1/tunings").json()["items"]) == 2
    page.get_by_role("button", name="Submit the tuning").click()
    page.wait_for_url(lambda url: "/tunings/tun_" in url and url != before)
    expect(state(page)).to_have_text("Succeeded")
    again = service.http.get(f"/v1/tunings/{page.url.rpartition('/')[2]}").json()
    assert again["request"] == made["request"]
    assert {name: again[name] for name in names} == names


def test_a_device_that_takes_no_work_shows_the_cause(start_service: StartService, visit: Open, tmp_path: Path) -> None:
    """The overview shows the cause beside the device, not the state free, until the cause is gone."""
    (in_the_way := tmp_path / "disk").write_text("")
    opened = visit(start_service(runs_dir=in_the_way / "runs"))
    opened.excused = ("503",)  # the service is not ready either
    page = opened.open("/")
    device = page.locator("#devices tbody tr")
    expect(device).to_contain_text("Takes no work")
    expect(device).to_contain_text(str(in_the_way / "runs"))
    expect(device).not_to_contain_text("Free")
    expect(page.locator("#running")).not_to_contain_text("free")
    in_the_way.unlink()
    expect(device).to_contain_text("Alive")
    expect(device).to_contain_text("Free")
    expect(device).not_to_contain_text(str(in_the_way))


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("kind", ["tunings", pytest.param("jobs", marks=pytest.mark.thorough)])
def test_waiting_work_shows_its_queue_position(start_service: StartService, visit: Open, kind: str) -> None:
    """The position is updated as the queue moves, and disappears when the work no longer waits."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    ahead = [f"/v1/tunings/{queued(service, 'tunings', size)}" for size in (3, 5)]
    assert started.wait(240)
    last = queued(service, kind, 6)
    page = visit(service).open(f"/{kind}/{last}")
    expect(page.locator("#progress")).to_contain_text("Second on cpu")
    service.http.post(f"{ahead[1]}/cancel")
    expect(page.locator("#progress")).to_contain_text("Next on cpu")
    page.get_by_role("button", name="Lower the priority").click()
    expect(page.locator("#progress")).to_contain_text("Priority -10")
    service.http.post(f"/v1/{kind}/{last}/cancel")
    expect(state(page)).to_have_text("Cancelled")
    expect(page.locator("#progress")).not_to_contain_text("on cpu")
    if kind == "tunings":
        expect(page.locator("#progress")).to_contain_text("Nothing was proven.")
        expect(page.get_by_role("link", name="Repeat")).to_have_attribute("href", f"/tunings/new?repeat={last}")


def queued(service: Running, kind: str, size: int) -> str:
    """The id of a tuning, or of a job of some recommendation, that waits or runs."""
    documents = {
        "tunings": tuning_request(effective_batch_size=size).model_dump(mode="json"),
        "jobs": {
            "recommendation": recommendation().model_dump(mode="json"),
            "training": {"updates": size},
        },
    }
    made = service.http.post(f"/v1/{kind}", json=documents[kind])
    assert made.status_code == 202, made.text
    return str(made.json()["id"])


@pytest.mark.usefixtures("no_charts")
def test_a_tuning_that_is_cancelled(start_service: StartService, visit: Open) -> None:
    """The button ends the running probe; the page shows the new state without a reload."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    page = visit(service).open(f"/tunings/{queued(service, 'tunings', 100)}")
    assert started.wait(240)
    expect(state(page)).to_have_text("Running")
    page.evaluate("window.same = true")
    page.get_by_role("button", name="Cancel").click()
    expect(state(page)).to_have_text("Cancelled")
    assert page.evaluate("window.same")


@pytest.mark.usefixtures("no_charts")
def test_probes_appear_as_they_end(start_service: StartService, visit: Open) -> None:
    """Each probe appears by itself, with what runs now, to the end and without a reload."""
    steps = threading.Semaphore(0)

    def wait_for_step(_size: int, should_stop: Callable[[], bool]) -> None:
        while not steps.acquire(timeout=0.05) and not should_stop():
            pass

    service = start_service(ScriptedRunner(37, wait_for_step))
    page = visit(service).open(f"/tunings/{queued(service, 'tunings', 100)}")
    expect(page.locator("#probes")).to_contain_text("No probe has ended yet")
    expect(page.locator("#progress").get_by_role("heading")).to_contain_text("at micro-batch 1…")
    for number in (1, 2):
        steps.release()
        expect(page.locator("#probes tbody tr")).to_have_count(number)
    expect(page.locator("#progress")).to_contain_text(re.compile("So far: .* fits, "))
    for _ in range(30):
        steps.release()
    expect(state(page)).to_have_text("Succeeded")
    expect_answer(page)
    assert service.http.get(f"/v1/tunings/{page.url.rpartition('/')[2]}").json()["activity"] is None


@pytest.mark.usefixtures("no_charts")
def test_wrong_fields_are_marked(service: Running, visit: Open) -> None:
    """An error of the service is shown at its field; an unreadable value is not sent."""
    opened = visit(service)
    opened.excused = ("422",)
    page = opened.open("/tunings/new")
    page.get_by_role("button", name="a small GPT").click()
    page.get_by_label("Effective batch size").fill("0")
    page.get_by_role("button", name="Submit the tuning").click()
    expect(page.locator("[data-path='effective_batch_size'] .field-error")).to_contain_text("must be at least 1")
    page.get_by_label("Effective batch size").fill("8")
    page.get_by_text("Advanced: name").click()
    page.get_by_label("Memory limit").fill("much")
    page.get_by_role("button", name="Submit the tuning").click()
    expect(page.locator("[data-path='memory_limit_bytes'] .field-error")).to_contain_text("is not a size")
    page.get_by_label("Memory limit").fill("2 GiB")
    page.get_by_role("button", name="Submit the tuning").click()
    page.wait_for_url(re.compile(r"/tunings/tun_"))
    expect(page.locator("#facts")).to_contain_text("2.00 GiB")


@pytest.mark.thorough
def test_the_first_start_offers_an_example(service: Running, visit: Open) -> None:
    """The overview of an empty service leads to a form that is filled in, and no longer does after a tuning."""
    page = visit(service).open("/")
    page.get_by_role("link", name="Try an example").click()
    expect(page.get_by_label("Effective batch size")).to_have_value("256")
    page.get_by_role("button", name="Submit the tuning").click()
    expect(state(page)).to_have_text("Succeeded")
    page.goto(f"{service.url}/")
    expect(page.locator("#figures")).to_contain_text("Succeeded1")
    expect(page.get_by_role("link", name="Try an example")).to_have_count(0)


# --- recommendations ---


def test_recommendations_are_compared(service: Running, visit: Open) -> None:
    """Rows that differ are marked, and the figures of a plan, side by side, multiply to its own batch."""
    one, other = tune(service, effective_batch_size=100), tune(service, effective_batch_size=37)
    page = visit(service).open("/recommendations")
    expect(page.locator(".selection")).to_contain_text(re.compile(r"\d+ recommendations"))
    for found in (one, other):
        page.get_by_label(f"Select {found['recommendation_id']}").check()
    page.get_by_role("link", name="Compare 2 recommendations").click()
    batch = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="Effective batch"))
    expect(batch.get_by_role("cell")).to_have_text(["100", "37"])
    expect(batch).to_contain_text("differs")
    for title, figures in {"Micro-batch of the plan": ["34", "37"], "Accumulation steps": ["3", "1"]}.items():
        row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=title))
        expect(row.get_by_role("cell")).to_have_text(figures)
    titles = page.get_by_role("rowheader").all_inner_texts()
    assert [title.partition("differs")[0].strip() for title in titles[11:15]] == [
        "Plan",
        "Micro-batch of the plan",
        "Accumulation steps",
        "Ranks",
    ]
    expect(page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="Precision"))).not_to_contain_text(
        "differs"
    )


def test_an_export_is_copied(service: Running, visit: Open) -> None:
    """The file on the clipboard is the one that the API gives, options included."""
    found = tune(service, effective_batch_size=100)["recommendation"]
    page = visit(service).open(f"/recommendations/{found['id']}")
    page.get_by_label("Target").select_option("slurm")
    page.get_by_label("Queue").fill("gpu-long")
    page.get_by_label("Queue").blur()
    expect(page.locator("#exported")).to_contain_text("gpu-long")
    page.locator("#exported figure.code").first.get_by_role("button", name="Copy").click()
    path = f"/v1/recommendations/{found['id']}/exports/slurm"
    made = service.http.get(path, params={"queue": "gpu-long"}).json()
    assert page.evaluate("navigator.clipboard.readText()") == made["files"][0]["content"]


def test_an_inexact_export_says_so(service: Running, visit: Open) -> None:
    """The export is refused with a message until it is allowed, and then shows both numbers."""
    found = tune(service, spec=mlp_spec(parallelism={"world_size": 2}), effective_batch_size=101)["recommendation"]
    opened = visit(service)
    opened.excused = ("409",)
    page = opened.open(f"/recommendations/{found['id']}")
    page.get_by_label("Target").select_option("deepspeed")
    expect(page.locator("#exported")).to_contain_text("allow_inexact")
    page.get_by_label("Allow an inexact batch size").check()
    expect(page.locator("#exported").get_by_role("status")).to_contain_text("100 instead of 101")


# --- a job ---


def opened_job(start_service: StartService, visit: Open, trainer: Trainer) -> Page:
    """The page of a job of ten updates, which the trainer holds."""
    service = start_service(None, trainer)
    body = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 10}}
    made = service.http.post("/v1/jobs", json=body).json()
    opened = visit(service)
    opened.excused = ("409",)  # the scripted trainer leaves no folder to read a log from
    return opened.open(f"/jobs/{made['id']}")


@pytest.mark.thorough
def test_a_job_is_followed_and_cancelled(start_service: StartService, visit: Open) -> None:
    """The page shows the updates; the button cancels the job."""
    page = opened_job(start_service, visit, Trainer(hold_at=7))
    expect(page.locator("#progress")).to_contain_text("6 of 10 updates")
    expect(page.locator("#loss .main-svg").first).to_be_attached()
    page.get_by_role("button", name="Cancel").click()
    expect(state(page)).to_have_text("Cancelled")


@pytest.mark.usefixtures("no_charts")
def test_a_job_shows_its_evaluations(start_service: StartService, visit: Open) -> None:
    """Held-out loss and metrics of each evaluation are listed, the newest first, and the best one is marked."""
    page = opened_job(start_service, visit, Trainer(hold_at=7, evaluates=True))
    expect(page.locator("#newest")).to_contain_text("0.7500 best weights after update 4")
    rows = page.locator("#evaluations tbody tr")
    expect(rows).to_have_text([re.compile(start) for start in ("^6", "^best 4", "^2", "^0")])
    expect(rows.first).to_contain_text("0.7500")
    expect(page.locator("#evaluations th[scope=col]")).to_have_text(
        ["After update", "Held-out loss", "accuracy", "Samples", "Seconds"]
    )


@pytest.mark.usefixtures("no_charts")
def test_files_on_another_host_are_one_sentence(start_service: StartService, visit: Open) -> None:
    """Nothing is requested that this server cannot read."""
    service = start_service(None, Trainer())
    body = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 2}}
    made = service.http.post("/v1/jobs", json=body).json()
    ended = service.http.get(f"/v1/jobs/{made['id']}", params={"wait": 20}).json()
    shutil.rmtree(ended["directory"])
    page = visit(service).open(f"/jobs/{made['id']}")
    expect(page.locator("#answer")).to_contain_text("Trained for 2 updates")
    expect(page.locator("#elsewhere")).to_contain_text("are on host, which this server cannot read")
    expect(page.locator("#log, #checkpoints")).to_have_count(0)


# --- who may ---


@pytest.mark.usefixtures("no_charts")
def test_signing_in_and_out(service: Running, visit: Open) -> None:
    """An unknown key is refused, a valid one opens the requested page, and after signing out nothing is shown."""
    key = service_key(service, *Scope)
    opened = visit(service)
    opened.excused = ("401",)
    page = opened.open("/tunings?state=FAILED")
    page.get_by_label("API key").fill("bw_nothing")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("main")).to_contain_text("unknown to this service")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(re.compile(r"/tunings\?state=FAILED$"))
    submit_page = opened.open("/tunings/new")
    submit(submit_page)
    expect(state(page)).to_have_text("Succeeded")
    page.get_by_role("button", name="Sign out").click()
    opened.open("/tunings")
    expect(page).to_have_url(re.compile(r"/sign-in"))


@pytest.mark.thorough
def test_a_key_without_the_scope(service: Running, visit: Open) -> None:
    """A key that may only read is offered nothing else, and the API refuses the rest as well."""
    key = service_key(service, Scope.TUNINGS_READ)
    opened = visit(service)
    opened.excused = ("401", "403")
    page = opened.open("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(opened.url + "/")
    page = opened.open("/tunings/new")
    expect(page.locator("main")).to_contain_text("may not submit tunings")
    expect(page.get_by_role("button", name="Submit the tuning")).to_be_disabled()
    token = page.locator("meta[name='csrf-token']").get_attribute("content")
    status = page.evaluate(
        "async ([token, body]) => (await fetch('/v1/tunings', {method: 'POST', body, "
        "headers: {'Content-Type': 'application/json', 'X-CSRF-Token': token}})).status",
        [token, tuning_request().model_dump_json()],
    )
    assert status == 403
    expect(page.get_by_role("link", name="API keys")).to_have_count(0)


def service_key(service: Running, *scopes: Scope) -> str:
    """A key of the service."""
    new, text = make_key("someone", scopes)
    service.system.store.keys.add(new)
    return text


# --- visitors who come from elsewhere, may read little, or come back ---

ID = "0" * 32
READING = [
    "/",
    "/recommendations",
    f"/tunings/tun_{ID}",
    f"/recommendations/compare?id=rec_{ID}&id=rec_{'1' * 32}",
    f"/recommendations/rec_{ID}",
]


def sign_in(page: Page, service: Running, *scopes: Scope) -> None:
    """As whoever has a new key of these scopes."""
    new, text = make_key("visitor", scopes)
    service.system.store.keys.add(new)
    page.goto(f"{service.url}/sign-in")
    page.get_by_label("API key").fill(text)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{service.url}/")


def test_a_link_of_another_site_opens_its_page(service: Running, browser: Browser) -> None:
    """A signed-in user sees the page at once, although the browser sends no cookie along the link."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.JOBS_READ)
        elsewhere = service.url.replace("127.0.0.1", "elsewhere.example")
        link = f'<a href="{service.url}/jobs?state=FAILED">see</a>'
        opened.page.route(f"{elsewhere}/**", lambda route: route.fulfill(body=link, content_type="text/html"))
        opened.page.goto(elsewhere)
        opened.page.get_by_role("link").click()
        expect(opened.page).to_have_url(re.compile(r"127\.0\.0\.1:\d+/jobs\?state=FAILED$"))
        expect(opened.page.locator("h1")).to_have_text("Jobs")
        opened.excused = ("foreign request: http://elsewhere.example",)


@pytest.mark.parametrize("pages", [READING[:2], pytest.param(READING[2:], marks=pytest.mark.thorough)])
def test_a_key_for_jobs_sees_which_scope_other_pages_need(service: Running, browser: Browser, pages: list[str]) -> None:
    """No page makes a call that the API would refuse: each names the scope (a 403 would fail the test)."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.JOBS_READ)
        for path in pages:
            page = opened.open(path)
            expect(page.locator("main .alert")).to_contain_text("tunings:read")
        expect(opened.open("/").locator("#running")).to_contain_text("Nothing is running")


def test_a_filled_form_survives_an_expired_session(service: Running, browser: Browser) -> None:
    """A user whose session ended signs in again and finds the form filled; the next visitor of the tab does not."""
    with watched(browser, service.url) as opened:
        opened.excused = ("401",)
        sign_in(opened.page, service, Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)
        page = opened.open("/tunings/new")
        page.get_by_role("button", name="a small GPT").click()
        page.get_by_label("Effective batch size").fill("123")
        page.context.clear_cookies()
        page.get_by_role("button", name="Submit the tuning").click()
        page.wait_for_url(re.compile(r"/sign-in\?next="))
        new, text = make_key("again", (Scope.TUNINGS_READ, Scope.TUNINGS_WRITE))
        service.system.store.keys.add(new)
        page.get_by_label("API key").fill(text)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(f"{service.url}/tunings/new")
        expect(page.get_by_label("Effective batch size")).to_have_value("123")
        expect(page.locator("#preview")).to_contain_text('"gpt"')
        page.reload()
        expect(page.get_by_label("Effective batch size")).to_have_value("")


@pytest.mark.thorough
def test_escape_does_not_lose_a_new_key(service: Running, browser: Browser) -> None:
    """It is shown once: only the button that says so closes it."""
    with watched(browser, service.url) as opened:
        sign_in(opened.page, service, Scope.ADMIN)
        page = opened.open("/keys")
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Name").fill("night shift")
        page.get_by_role("button", name="Create the key").click()
        expect(page.get_by_text("Copy it now")).to_be_visible()
        for _ in range(3):
            page.keyboard.press("Escape")
        expect(page.get_by_text("Copy it now")).to_be_visible()
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_text("Copy it now")).to_have_count(0)


# --- the service dies ---


@pytest.mark.thorough
def test_a_page_recovers_when_the_service_comes_back(browser: Browser, tmp_path: Path) -> None:
    """The open page reports a killed service, reconnects after its restart, and shows the end of the tuning."""
    start = partial(
        slow_service, tmp_path / "data", tmp_path / "journal", 2.0, environment={"BATCHWRIGHT_LEASE_SECONDS": "5"}
    )
    with ExitStack() as stack:
        first = stack.enter_context(start())
        opened = stack.enter_context(watched(browser, first.url))
        opened.excused = ("ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "ERR_SOCKET")
        page = opened.open("/tunings/new")
        submit(page)
        expect(state(page)).to_have_text("Running")
        page.evaluate("window.same = true")
        first.end(signal.SIGKILL)
        expect(page.locator("#connection")).to_contain_text("Reconnecting")
        stack.enter_context(start(int(first.url.rpartition(":")[2])))
        expect(state(page)).to_have_text("Succeeded", timeout=120_000)
        assert page.evaluate("window.same")
