"""Functions and components of the pages' ES modules, all called on one open page."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Request, Route, expect

from batchwright.cli.arguments import option_of
from batchwright.client.documents.bulk import MOST_IDS
from batchwright.client.documents.work import TuningSubmission
from batchwright.planning.plan_figures import expected_bytes
from batchwright.schemas.requests import Baseline, Named, TuningRequest
from batchwright_service.dashboard.new_tuning import presets
from batchwright_service.registry.registered_commands import RegisteredCommands
from tests.support.factories import probe_result, tuning_request
from tests.support.service.browser import Modules, watched
from tests.support.service.registered import commands_file
from tests.support.service.running import Running

CPU_WORDS = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 "
    "bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB. "
    "See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
TIMES = "\N{MULTIPLICATION SIGN}"
MIB = 2**20
MEASURED = {"accumulates": True, "process_peak_bytes": None, "context_bytes": 5 * MIB, "resident_bytes": 8 * MIB}


@pytest.fixture(scope="module")
def modules(shared_service: Running, browser: Browser) -> Iterator[Modules]:
    """The modules of a service that has no keys."""
    with watched(browser, shared_service.url) as opened:
        opened.excused = ("503",)
        yield Modules(opened.open("/sign-in"))


# --- texts ---


def test_values_are_written_as_people_read_them(modules: Modules) -> None:
    """Sizes, durations, counts, shares and identifiers, and a dash for what is not known."""
    calls: dict[str, list[tuple[list[object], str]]] = {
        "bytes": [([1610612736], "1.50 GiB"), ([1023], "1023 bytes"), ([None], "\N{EN DASH}")],
        "seconds": [
            ([93.2], "1 min 33 s"),
            ([0.25], "250 ms"),
            ([9.96], "10.0 s"),
            ([7200], "2 h"),
            ([90061], "1 d 1 h"),
        ],
        "count": [([12345], "12,345")],
        "number": [([2.30258, 3], "2.30"), ([0.0004, 3], "4.0e-4")],
        "percent": [([0.9312], "93.1 %")],
        "plural": [([1, "probe"], "1 probe"), ([2, "query", "queries"], "2 queries")],
        "shortId": [(["tun_0192f3a1b2c3700089abcdef01234567"], "tun_…01234567")],
        "words": [(["INVALID_SIZE"], "Invalid size")],
        "ago": [
            (["2026-01-01T00:00:00Z", 1767225780000], "3 min ago"),
            (["2026-01-01T00:00:00Z", 1767139200000], "in 1 d"),
            (["2026-01-01T00:00:00Z", 1777225780000], "1 Jan 2026"),
        ],
    }
    made = modules.run(
        "const format = await load('format');"
        "return Object.entries(given).map(([name, calls]) => [name, calls.map(([args]) => format[name](...args))])",
        calls,
    )
    assert dict(made) == {name: [text for _, text in pairs] for name, pairs in calls.items()}


def test_a_plan_without_its_sizes_is_written_as_an_even_split(modules: Modules) -> None:
    """Name only the largest size of a plan whose ranks have unequal shares, or that is not split evenly."""
    plan = {"world_size": 1, "gradient_accumulation_steps": 3, "micro_batch_size": 34, "effective_batch_size": 100}
    changes = [
        {},
        {"effective_batch_size": 102},
        {"effective_batch_size": 99},
        {"world_size": 2, "micro_batch_size": 17},
    ]
    texts = modules.run(
        "const { planText } = await load('plan'); return given.map(planText)",
        [plan | change for change in [*changes, {"world_size": 3, "micro_batch_size": 12}]],
    )
    assert texts == [
        f"34 + 2 {TIMES} 33",
        f"3 {TIMES} 34",
        f"3 steps {TIMES} ≤\N{NO-BREAK SPACE}34",
        f"2 ranks {TIMES} (2 {TIMES} 17 + 16)",
        f"3 ranks {TIMES} 3 steps {TIMES} ≤\N{NO-BREAK SPACE}12",
    ]


def test_every_text_of_an_allocator_is_shortened(modules: Modules) -> None:
    """Messages of both devices are shortened within a sentence; other messages, and raw text sent apart, are kept."""
    texts = [
        f"44 ran out of memory (out of memory in phase measure: {CPU_WORDS}).",
        f"{CUDA_WORDS}",
        f"38 failed (out of memory in phase build: {CUDA_WORDS}).",
        f"{CPU_WORDS}; then {CPU_WORDS}",
        "the loss is no sum [of terms]",
    ]
    shortened, shown = modules.run(
        """const { shortened, withDetails } = await load("device_words");
        (await load("preact-htm")).render(withDetails("short", "the raw text"), place);
        return [given.map(shortened), place.textContent];""",
        texts,
    )
    assert shortened == [
        "44 ran out of memory (asked for 2.00 MiB more in the measured update).",
        "asked for 1.50 GiB more",
        "38 failed (asked for 1.50 GiB more while the model was built).",
        "asked for 2.00 MiB more; then asked for 2.00 MiB more",
        "the loss is no sum [of terms]",
    ]
    assert shown == "shortMessage of the allocatorthe raw text"


def test_only_a_size_that_failed_is_said_not_to_fit(modules: Modules) -> None:
    """A bound and a probe without a verdict prove nothing of larger sizes."""
    words = modules.run(
        "const { provenWords } = await load('device_words');"
        "return given.map(([reason, next]) => provenWords({ stopped_by: reason, fits: 167, next_size: next }))",
        [("oom", 168), ("oom", 250), ("bound", None), ("timeout", 168)],
    )
    assert words == [
        "Proven: 167 fits, 168 does not.",
        "Proven: 167 fits, 250 does not.",
        "Proven: 167 fits. Larger sizes were not tried.",
        "Proven: 167 fits. Larger sizes may fit too.",
    ]


def test_the_answer_names_the_plan_what_is_proven_and_what_it_gains(modules: Modules) -> None:
    """Plans of one and of several ranks, and a baseline that is slower, faster, or runs out of memory."""
    before = {"gradient_accumulation_steps": 38, "micro_batch_size": 16, "world_size": 1, "effective_batch_size": 608}
    gains: list[dict[str, Any] | None] = [
        {"baseline_fits": True, "speedup": 1.949, "speed_source": "measured", "baseline": before},
        {"baseline_fits": True, "speedup": 0.8, "speed_source": "estimated", "baseline": before},
        {"baseline_fits": False, "speedup": None, "speed_source": None, "baseline": before},
        None,
    ]
    sizes = [[[300, 300]], [[34, 33, 33]], [[25], [25]], [[9, 8], [9, 8], [9, 9]]]
    answers = modules.run(
        """const { answerInWords } = await load("answer");
        const proof = { stopped_by: "oom", fits: 317, next_size: 318 };
        return given.map(([sizes, gain]) => {
          const total = sizes.flat().reduce((sum, size) => sum + size);
          const plan = { micro_batch_sizes: sizes, effective_batch_size: total, exact: true };
          return answerInWords({ plan, gain, warnings: [], evidence: { proof } });
        });""",
        list(zip(sizes, gains, strict=True)),
    )
    assert [answer["plan"].replace(TIMES, "x") for answer in answers] == [
        "2 x 300",
        "34 + 2 x 33",
        "2 ranks x (1 x 25)",
        "2 ranks x (9 + 8) + 1 rank x (2 x 9)",
    ]
    assert answers[0]["batch"] == "= 600 exactly"
    assert answers[0]["proof"] == "Proven: 317 fits, 318 does not."
    assert [answer["gain"] and answer["gain"].replace(TIMES, "x") for answer in answers] == [
        "1.95x faster than 38 x 16.",
        "About 0.80x the speed of 38 x 16 (estimated).",
        "38 x 16 runs out of memory.",
        None,
    ]


def test_the_shown_command_has_every_option_of_the_request(modules: Modules) -> None:
    """A request without defaults: the command line reads each of its fields back from the shown command."""
    changed: dict[str, Any] = {
        "objective": "fastest",
        "device": "cuda:1",
        "memory_limit_bytes": 2**30,
        "memory_margin": 0.1,
        "granularity": 8,
        "max_micro_batch_size": 64,
        "uniform": True,
        "what_if": True,
        "probe_timeout_seconds": 60.0,
        "allow_batch_coupling": True,
        "baseline": Baseline(micro_batch_size=8, accumulation_steps=16),
    }
    request = tuning_request(**changed)
    hardware = {"gpu": "H100-80GB", "min_memory_bytes": 2**36}
    for_hardware = tuning_request(device=None, hardware=hardware, quick=True)
    seen = request.model_fields_set | for_hardware.model_fields_set
    assert seen == set(TuningRequest.model_fields) - {"uniform_only"}  # of commands
    for sent, fields in ((request, changed), (for_hardware, {**hardware, "quick": True})):
        shown = modules.run("return (await load('reproduce')).asCommand(given)", sent.model_dump(mode="json"))
        words = shlex.split(shown)
        options = {word for word in words if word.startswith("--")}
        assert ("8x16" in words) == ("baseline" in fields)
        assert options == {"--effective-batch-size", *(option_of(field) for field in fields)}


TUNING = {"name": "night", "project": "lm", "labels": {"team": "ops"}, "priority": -1, "problem": None}


def test_a_repeated_tuning_keeps_its_names_and_raises_a_limit_that_was_too_short(modules: Modules) -> None:
    """The submission has all fields, probes again where a recommendation is stored, and the command has its names."""
    request = tuning_request(probe_timeout_seconds=60.0).model_dump(mode="json")
    answered = {"evidence": {"proof": {"stopped_by": "oom"}}}
    open_ended = {"evidence": {"proof": {"stopped_by": "timeout"}}}
    failures: list[dict[str, Any]] = [
        {"recommendation": answered},
        {"recommendation": open_ended},
        {"recommendation": None, "problem": {"code": "probe-timed-out"}},
        {"recommendation": None, "request": {**request, "probe_timeout_seconds": 400.0}},
    ]
    submissions, command = modules.run(
        """const { asCommand, submissionAgain } = await load("reproduce");
        const made = given.map(submissionAgain);
        return [made, asCommand(made[0])];""",
        [TUNING | {"request": request} | failure for failure in failures],
    )
    parsed = [TuningSubmission.model_validate(submission) for submission in submissions]
    assert all(each.names == Named(name="night", project="lm", labels={"team": "ops"}) for each in parsed)
    assert [(each.priority, each.fresh) for each in parsed] == [(-1, True), (-1, True), (-1, False), (-1, False)]
    assert [each.probe_timeout_seconds for each in parsed] == [60.0, 300.0, 300.0, 400.0]
    assert parsed[0].to_request().model_dump(mode="json") == request
    assert "--name night \\\n  --project lm \\\n  --label team=ops" in command


def test_the_chart_has_the_line_of_the_planners_model(modules: Modules) -> None:
    """Two fits that noise turns round bend it no more than the table; where nothing was estimated, it is straight."""
    peaks = {16: 34.2, 86: 117.4, 92: 124.2, 93: 123.6}
    probes = [
        probe_result(size).model_copy(update=MEASURED | {"peak_reserved_bytes": round(peak * MIB)})
        for size, peak in peaks.items()
    ]
    probes.append(probes[0].model_copy(update={"micro_batch_size": 500, "accumulates": False}))
    low = {"points": [{"micro_batch_size": size, "used_bytes": (7 + 1.1 * size) * MIB} for size in (1, 8, 64)]}
    affine = [
        {"outcome": "FIT", "accumulates": True, "micro_batch_size": size, "peak_reserved_bytes": (8 + 2 * size) * MIB}
        for size in (10, 20)
    ]
    sizes = [16, 55, 75, 92, 94, 110]
    drawn, straight, words = modules.run(
        """const { memoryInWords, modelOf } = await load("memory_chart");
        const model = modelOf(given.probes, given.low);
        const words = memoryInWords(given.probes, model, { limitBytes: null });
        return [given.sizes.map(model), given.sizes.map(modelOf(given.affine)), words];""",
        {"probes": [probe.model_dump(mode="json") for probe in probes], "low": low, "affine": affine, "sizes": sizes},
    )
    table = [expected_bytes(500, size, probes) for size in sizes[:4]]
    assert drawn[:4] == pytest.approx(table, rel=0.02)
    assert drawn == sorted(drawn)
    assert drawn[-1] - drawn[-2] == pytest.approx(16 * 1.18 * MIB, rel=0.03)
    assert straight == pytest.approx([(8 + 2 * size) * MIB for size in sizes])
    assert words.startswith("5 probes: 5 fit. Memory grows by about 1.")


def test_occupancy_is_drawn_and_said(modules: Modules) -> None:
    """A bar for each share, the time of the last work in words, and the seconds; a slot without work has none."""
    day = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-02T00:00:00Z", "bucket_seconds": 1800}
    shares = {"slot": "host/cpu", "tunings": [0.5, 1] + [0] * 46, "jobs": [0.5, 0, 0.5] + [0] * 45, "busy": 2 / 48}
    words, held, bars, nothing = modules.run(
        """const { occupancyOf, strip, busyWords, secondsHeld } = await load("occupancy");
        const found = occupancyOf("host/cpu", given);
        (await load("preact-htm")).render(strip(found), place);
        const bars = ["strip-tunings", "strip-jobs"].map((kind) => place.querySelectorAll(`.${kind}`).length);
        return [busyWords(found), secondsHeld(found), bars, busyWords(occupancyOf("elsewhere/cpu", given))];""",
        day | {"devices": [shares]},
    )
    assert re.fullmatch(r"Busy 4\.2 % of the last 24 hours, last in the half hour from .*:00:00", words)
    assert (held, bars) == ({"tunings": "45 min", "jobs": "30 min"}, [2, 2])
    assert nothing == "Held no work in the last 24 hours"


# --- pages of a list ---

PAGED = """
  const { makePages } = await load("pagination");
  const [before, after, size, loads] = given;
  let rows = before;
  const read = async (cursor, limit) => {
    const found = rows.slice(cursor === null ? 0 : rows.indexOf(cursor) + 1).slice(0, limit);
    return { items: found.map((id) => ({ id })), next_cursor: found.at(-1) === rows.at(-1) ? null : found.at(-1) };
  };
  const pages = makePages(read, { size, isNewestFirst: false });
  await pages.refresh(() => true);
  for (let load = 0; load < loads; load += 1) {
    await pages.load();
  }
  rows = after;
  await pages.refresh(() => true);
  const shown = pages.rows().map(({ id }) => id);
"""
"""A sorted list with some of its pages loaded, and its shown rows after a change."""


@pytest.mark.parametrize(
    ("after", "shown"),
    [("axbcd", "axbcd"), ("xabcd", "xabcd"), ("xyabcd", "xy"), ("bacd", "bacd"), ("acd", "acd"), ("abcd", "abcd")],
)
def test_new_rows_push_none_out_of_a_sorted_list(modules: Modules, after: str, shown: str) -> None:
    """Rows pushed off the first page stay, also when a new one became its last; else they are loaded again."""
    found = modules.run(
        PAGED + "while (pages.hasOlder()) { await pages.load(); } return [shown, pages.rows().map(({ id }) => id)]",
        [list("abcd"), list(after), 2, 1],
    )
    assert ["".join(ids) for ids in found] == [shown, after]


def test_a_long_list_shows_ten_of_its_pages(modules: Modules) -> None:
    """Later pages take the place of the first ones, which come back."""
    rows = [f"{number:03}" for number in range(150)]
    shown, was_newer, back = modules.run(
        PAGED + "const newer = pages.hasNewer(); pages.back(); return [shown, newer, pages.rows().map(({ id }) => id)]",
        [rows, rows, 10, 12],
    )
    assert (shown, was_newer, back) == (rows[30:130], True, rows[:100])


# --- filters ---

MOUNTED_FILTERS = """
  const [{ Filters, noValues, valuesIn }, { html, render }] = [await load("filters"), await load("preact-htm")];
  const filters = [
    { name: "state", label: "State", multiple: true, options: [["FAILED", "Failed"], ["CANCELLED", "Cancelled"]] },
    { name: "model", label: "Model", suggest: (row) => row.model },
    { name: "created_after", label: "Created after", type: "datetime-local" },
    { name: "q", label: "Search", live: true },
  ];
  const view = {
    values: valuesIn(filters, new URLSearchParams(given)),
    apply(values) { view.values = window.applied = values; document.body.dataset.search = values.q; draw(); },
    clear() { view.apply(noValues(filters)); },
  };
  const rows = [{ model: "gpt" }];
  const draw = () => render(html`<${Filters} filters=${filters} columns=${[]} view=${view} rows=${rows} />`, place);
  draw();
  await drawn();
"""


def test_an_address_sets_known_filters_alone(modules: Modules) -> None:
    """A value that no option has is left out; a filter of one value takes the first; an address has what is set."""
    values, set_now, address = modules.run(
        MOUNTED_FILTERS
        + """const { addressOf } = await load("api");
        return [view.values, (await load("filters")).isFiltered(view.values), addressOf("/tunings", view.values)];""",
        "state=FAILED&state=nothing&state=FAILED&state=CANCELLED&model=a&model=b&q=two+words",
    )
    assert values == {"state": ["FAILED", "CANCELLED"], "model": ["a"], "created_after": [], "q": "two words"}
    assert set_now
    assert address == "/tunings?state=FAILED&state=CANCELLED&model=a&q=two+words"


def test_each_filter_is_a_chip_that_a_click_removes(modules: Modules) -> None:
    """States add up, another model replaces the first, a suggested one applies at once, and a time is readable."""
    page = modules.page
    modules.run(MOUNTED_FILTERS, "created_after=2100-01-02T03:04:05Z")
    page.get_by_role("combobox", name="State").select_option("Cancelled")
    page.get_by_role("combobox", name="State").select_option("Failed")
    page.get_by_label("Filter by").select_option("Model")
    page.get_by_role("combobox", name="Model").fill("nothing")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("combobox", name="Model").fill("gpt")
    chips = page.get_by_role("list", name="Set filters").locator(".chip")
    texts = ("State: Cancelled", "State: Failed", "Model: gpt", "Created after: .* Jan 2100")
    expect(chips).to_have_text([re.compile(text) for text in texts])
    page.get_by_role("button", name="Remove the filter State: Cancelled", exact=True).click()
    expect(chips).to_have_count(3)
    assert page.evaluate("applied") == {
        "state": ["FAILED"],
        "model": ["gpt"],
        "created_after": ["2100-01-02T03:04:05Z"],
        "q": "",
    }
    page.get_by_role("button", name="Clear all").click()
    expect(chips).to_have_count(0)
    expect(page.get_by_label("Filter by")).to_be_focused()
    page.get_by_label("Search").press_sequentially("run ")
    expect(page.locator("body")).to_have_attribute("data-search", "run")
    page.get_by_label("Search").press_sequentially("on")
    expect(page.locator("body")).to_have_attribute("data-search", "run on")


# --- forms ---

FORM = """
  const { useForm, Field } = await load("schema_form");
  const { html, render } = await load("preact-htm");
  const document_ = await (await fetch("/tunings/new/schema")).json();
  const whole = (await load("command_form")).commandDocument(document_, given.commands ?? []);
  let form;
  const Shown = () => {
    form = useForm(whole, given.schema ?? "TuningSubmission", { choices: given.choices });
    return html`<${Field} form=${form} path=${given.path ?? "spec"} />`;
  };
  render(html`<${Shown} />`, place);
"""
"""The form of a new tuning, with the fields of the spec shown."""
PRESETS = {name: request for family in presets().values() for name, request in family.items()}


def test_a_preset_fills_the_form_with_all_of_it(modules: Modules) -> None:
    """The form's request equals the preset, for each of them, and the form has a field for all that they say."""
    made = modules.run(
        FORM
        + """const made = {};
        for (const [name, request] of Object.entries(given.presets)) {
          form.write(request);
          await drawn();
          made[name] = [form.read(), form.unknownFields(request)];
        }
        return made;""",
        {"presets": PRESETS},
    )
    for name, request in PRESETS.items():
        read, unknown = made[name]
        assert (read["problems"], read["missing"], unknown) == ([], [], []), name
        assert TuningSubmission.model_validate(read["value"]) == TuningSubmission.model_validate(request), name


def test_an_adapter_of_defaults_is_kept(modules: Modules) -> None:
    """Choosing the kind is enough, and choosing none takes the adapter out again."""
    targets = {
        "q_proj, v_proj": ["q_proj", "v_proj"],
        "all-linear": "all-linear",
        "q_proj\nk_proj\n": ["q_proj", "k_proj"],
    }
    lora = {"kind": "lora", "rank": 16}
    typed: list[tuple[str, str, object]] = [
        ("kind", "lora", {"kind": "lora"}),
        ("rank", "16", lora),
        *(("target_modules", text, lora | {"target_modules": sent}) for text, sent in targets.items()),
        ("quantization.kind", "fp4", lora | {"target_modules": ["q_proj", "k_proj"], "quantization": {"kind": "fp4"}}),
        ("kind", "", None),
    ]
    read = modules.run(
        FORM
        + """form.write(given.request);
        const read = [];
        for (const [name, text] of given.typed) {
          await drawn();
          (name.endsWith("kind") ? form.setKind : form.set)(`spec.adapter.${name}`, text);
          await drawn();
          read.push(form.read().value);
        }
        return read;""",
        {"request": PRESETS["Llama 3, 8 billion"], "typed": typed},
    )
    assert [value["spec"].get("adapter") for value in read] == [adapter for _, _, adapter in typed]
    for value in read:
        TuningSubmission.model_validate(value)


def test_a_text_that_cannot_be_read_is_a_problem_of_its_field(modules: Modules) -> None:
    """Sizes, numbers, labels and JSON are parsed; a problem goes to the nearest field that is shown."""
    texts = {
        "memory_limit_bytes": "much",
        "effective_batch_size": "1_000",
        "memory_margin": "many",
        "granularity": "9007199254740993",
        "labels": "team=vision\nalone",
    }
    value, problems, left, errors, size = modules.run(
        FORM
        + """Object.entries(given.texts).forEach(([path, text]) => form.set(path, text));
        await drawn();
        const { value, problems } = form.read();
        const refused = ["spec.model.kind.x", "effective_batch_size", "elsewhere"];
        const left = form.place(refused.map((field) => ({ field, message: "wrong" })));
        form.set("memory_limit_bytes", "1.5 GiB");
        await drawn();
        return [value, problems, left, form.errors, form.read().value.memory_limit_bytes];""",
        {"texts": texts},
    )
    assert value["effective_batch_size"] == 1000
    assert {problem["field"]: problem["message"].partition(":")[0] for problem in problems} == {
        "memory_limit_bytes": '"much" is not a size',
        "memory_margin": '"many" is not a number',
        "granularity": '"9007199254740993" is too large for an exact number in the browser',
        "labels": '"alone" is not a key and a value',
    }
    assert (left, size) == ([{"field": "elsewhere", "message": "wrong"}], 1.5 * 2**30)
    assert errors == {"spec.model": "kind.x: wrong", "effective_batch_size": "wrong"}


def test_a_device_is_chosen_from_those_of_the_workers(modules: Modules) -> None:
    """One that no worker has now stays chosen; where no device is known, its id is typed."""
    shown = """form.write({ device: "cuda:3" });
        await drawn();
        const { tagName, value, options = [] } = place.querySelector("#field-device");
        return [tagName, value, [...options].map(({ textContent }) => textContent)];"""
    choices = {"device": [["", "Any"], ["cpu", "cpu: a processor"]]}
    options = ["Any", "cpu: a processor", "cuda:3"]
    assert modules.run(FORM + shown, {"path": "device", "choices": choices}) == ["SELECT", "cuda:3", options]
    assert modules.run(FORM + shown, {"path": "device"}) == ["INPUT", "cuda:3", []]


def test_a_registered_command_has_a_form_of_its_arguments(modules: Modules, tmp_path: Path) -> None:
    """Fields, defaults and bounds are those that the operator registered; an argument that it lacks is named."""
    listed = RegisteredCommands.read(commands_file(tmp_path / "operator")).list().model_dump(mode="json")["items"]
    arguments = {"width": 7, "packing": True, "depth": 1}
    spec = {"model": {"kind": "command", "name": "wide", "arguments": arguments}}
    shown, options, read, unknown = modules.run(
        FORM
        + """form.write({ spec: given.spec });
        await drawn();
        const options = [...place.querySelector("#field-spec-model-arguments-note").options];
        const unknown = form.unknownFields({ spec: given.spec });
        return [place.textContent, options.map(({ value }) => value), form.read(), unknown];""",
        {"schema": "CommandSubmission", "spec": spec, "commands": listed},
    )
    assert "From 1 to 64." in shown
    assert "Wide model." in shown
    assert options == ["none", "hold"]
    assert read["missing"] == ["effective_batch_size"]
    assert read["value"]["spec"]["model"] == {"name": "wide", "arguments": {"width": 7, "packing": True}}
    assert unknown == [{"field": "spec.model.arguments.depth", "message": "is not a known field"}]


# --- acts on chosen rows ---


def test_a_long_selection_is_sent_in_parts(modules: Modules) -> None:
    """The dialog names the first rows and those that do not change; a row is refused by its reason, dropped or kept."""
    rows = [
        {"id": f"tun_{number}", "name": f"run {number}", "model": "gpt", "state": "FAILED"}
        for number in range(MOST_IDS + 10)
    ]
    parts: list[list[str]] = []

    def respond(route: Route) -> None:
        sent: Any = route.request.post_data_json
        assert sent["action"] == "delete"
        parts.append(sent["ids"])
        problem = {"detail": "It is held."}
        results = [{"id": name, "state": None, "status": 204, "problem": None} for name in sent["ids"]]
        if sent["ids"][0] == "tun_0":
            results[0] |= {"status": 409, "problem": problem}
        route.fulfill(json={"items": results})

    page = modules.page
    page.route("**/v1/tunings/bulk", respond)
    modules.run(
        """const [{ changeAll }, { render }] = [await load("bulk"), await load("preact-htm")];
        const [first, ...others] = given;
        const act = { kind: "tuning", action: "delete", rows: given, others: [first] };
        window.acted = changeAll(act).then(({ change, report }) => {
          render(report, place);
          return [first, others.at(-1), { id: "unsent" }].map(change);
        });""",
        rows,
    )
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("li")).to_have_count(9)
    expect(dialog.locator("li").last).to_have_text(f"and {len(rows) - 8} more")
    expect(dialog).to_contain_text("1 more selected tuning cannot be deleted, and will not change.")
    dialog.get_by_role("button", name=f"Delete {len(rows)} tunings").click()
    assert page.evaluate("acted") == [rows[0], None, {"id": "unsent"}]
    assert [len(part) for part in parts] == [MOST_IDS, 10]
    results = page.get_by_role("status").filter(has_text=f"{len(rows) - 1} tunings deleted, 1 refused")
    expect(results.locator("li").first).to_have_text("run 0: It is held.")
    page.unroute("**/v1/tunings/bulk")


def test_a_recommendation_is_confirmed_once(modules: Modules) -> None:
    """A second request has the first one's key, and says what came of that; a replaced one has nothing to confirm."""
    row = {"id": "rec_1", "name": "nightly", "stale": True, "feasible": True, "replaced_by": None, "confirmed_by": None}
    row |= {
        "changes": [{"name": "torch", "before": "2.8", "now": "2.9"}, {"name": "driver", "before": "570", "now": None}]
    }
    others: list[dict[str, object]] = [
        {"replaced_by": "rec_2"},
        {"stale": False},
        {"stale": False, "feasible": False, "confirmed_by": "rec_3"},
        {"stale": None},
    ]
    keys: list[str | None] = []

    def respond(route: Route) -> None:
        keys.append(route.request.header_value("idempotency-key"))
        route.fulfill(json={"id": "tun_1", "state": "QUEUED" if len(keys) == 1 else "SUCCEEDED"})

    modules.page.route("**/v1/recommendations/rec_1/confirm", respond)
    applies, marks, reports = modules.run(
        """const [{ CONFIRM, validMark }, { html, render }] = [await load("staleness"), await load("preact-htm")];
        document.body.dataset.scopes = "tunings:write";
        const text = (node) => {
          render(html`<div>${node}</div>`, place);
          return place.textContent;
        };
        const reports = [];
        for (let turn = 0; turn < 2; turn += 1) {
          const { done, report } = await CONFIRM.run([given[0]]);
          reports.push([done.length, text(report)]);
        }
        return [given.map(CONFIRM.applies), given.map((row) => text(validMark(row))), reports];""",
        [row, *(row | other for other in others)],
    )
    assert applies == [True, False, False, False, False]
    assert marks[0] == "stale Confirmtorch 2.8 → 2.9, driver 570 → none"
    assert [mark.partition("rec_")[0] for mark in marks[1:]] == ["stalereplaced by ", "valid", "unchangedas ", ""]
    assert reports == [
        [1, "1 recommendation being confirmednightly: tun_1"],
        [1, "1 recommendation confirmed beforenightly: tun_1"],
    ]
    assert keys[0] == keys[1] not in {None, ""}
    modules.page.unroute("**/v1/recommendations/rec_1/confirm")


# --- live updates ---


def test_a_lost_stream_goes_on_after_the_last_event(modules: Modules) -> None:
    """The header shows the outage, each event is delivered once, and 204 is the end."""
    asked: list[str | None] = []

    def respond(route: Route, request: Request) -> None:
        asked.append(request.header_value("last-event-id"))
        events = {
            "4": 'data: {"id": 5, "kind": "probe"}\n\ndata: {"id": 6, "ki',
            "5": 'data: {"id": 6, "kind": "state", "state": "FAILED"}\n\n',
        }
        if len(asked) == 1:
            route.fulfill(status=503, json={"code": "x"})
        elif (after := asked[-1] or "") in events:
            route.fulfill(body=events[after], content_type="text/event-stream")
        else:
            route.fulfill(status=204)

    modules.page.route("**/v1/tunings/tun_1/events", respond)
    events, states, ended = modules.run(
        """const { follow, onConnection } = await load("live");
        const [events, states] = [[], []];
        onConnection((state) => states.push(state));
        await new Promise((resolve) => {
          follow("/v1/tunings/tun_1/events", ({ id }) => events.push(id), { after: 4, onEnd: resolve });
        });
        return [events, states, document.getElementById("connection").dataset.state];"""
    )
    assert (events, ended) == ([5, 6], "idle")
    assert states[:3] == ["idle", "reconnecting", "live"]
    assert asked[0] == asked[1] == "4"
    assert asked[-1] == "6"
    modules.page.unroute("**/v1/tunings/tun_1/events")
