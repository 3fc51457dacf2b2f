"""Alert rules and dashboard of docs/operations: what they name exists, and Prometheus' own tool accepts them."""

import itertools
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from batchwright_service.observability.metrics import OUT_OF_MEMORY_CODE
from batchwright_service.worker.runner import RunOutOfMemoryError
from tests.support.factories import tuning_request
from tests.support.paths import ROOT
from tests.support.service.running import StartService

FILES = ROOT / "docs" / "operations"
RULES = FILES / "alerts.yml"
DASHBOARD = FILES / "grafana.json"
RULE_TESTS = Path(__file__).parent / "alerts_test.yml"
PAGE = (ROOT / "docs" / "alerts.md").read_text()
OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""
COLUMNS = 24
"""Columns of Grafana's grid."""
UNPACKED = ROOT / ".venv" / "conformance" / "prometheus" / "usr" / "bin" / "promtool"
"""Where `make conformance` puts the program, on a host that has not installed it."""

Labels = dict[str, set[str]]


def rules() -> list[dict[str, Any]]:
    """Every alert rule."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard, in their order; rows are panels too."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def targets() -> list[tuple[str, str]]:
    """The title and the expression of each query of the dashboard."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", ())]


def expressions() -> list[str]:
    """Every expression of rules and dashboard."""
    return [rule["expr"] for rule in rules()] + [expression for _, expression in targets()]


def scraped(text: str) -> Labels:
    """The labels of each metric of a scrape, by the names of its samples; of one without samples, none."""
    found: Labels = defaultdict(set)
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] |= set()
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics that an expression selects, with the labels of their matchers."""
    for name, matchers in re.findall(r"\b(batchwright_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


@pytest.fixture
def scrape(start_service: StartService) -> Labels:
    """A scrape of a service that has ended a tuning."""
    service = start_service()
    tuning = service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json")).json()
    assert service.http.get(f"/v1/tunings/{tuning['id']}?wait=30").json()["state"] == "SUCCEEDED"
    return scraped(service.http.get("/metrics").text)


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus' tool."""
    found = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else None)
    if found is None:
        pytest.skip("no promtool: `make conformance` unpacks Debian's package `prometheus`, which has it")
    return found


# --- names ---


def test_every_metric_and_label_is_scraped(scrape: Labels) -> None:
    """A renamed metric would leave an alert silent for ever; so would a label that no sample has."""
    found = [selector for expression in expressions() for selector in selectors(expression)]
    assert {name for name, _ in found} - scrape.keys() == set()
    wrong = [
        (name, labels - scrape[name] - OF_PROMETHEUS) for name, labels in found if scrape[name]
    ]  # of clusters and of a queue without work there are no samples here
    assert [(name, labels) for name, labels in wrong if labels] == []


def test_a_metric_that_is_not_scraped_is_found(scrape: Labels) -> None:
    """The names of a histogram's samples, not of its family, and the labels of one matcher of several."""
    assert "batchwright_tuning_seconds_count" in scrape
    assert {"state"} <= scrape["batchwright_tuning_seconds_count"]
    assert list(selectors('sum(rate(batchwright_a_total{b="1", c=~"2"}[5m])) > batchwright_d')) == [
        ("batchwright_a_total", {"b", "c"}),
        ("batchwright_d", set()),
    ]


def test_the_code_of_the_alert_is_that_of_the_error() -> None:
    """Its series exists from the start, so that the first failure is an increase."""
    assert RunOutOfMemoryError.code == OUT_OF_MEMORY_CODE
    assert any(OUT_OF_MEMORY_CODE in rule["expr"] for rule in rules())


# --- alerts ---


def test_every_alert_has_its_words_and_its_tests() -> None:
    """A summary, a description, a severity, a line of docs/alerts.md, and tests with and without it firing."""
    tested: dict[str, set[bool]] = defaultdict(set)
    for group in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in group["alert_rule_test"]:
            tested[case["alertname"]].add(bool(case["exp_alerts"]))
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert f"| `{rule['alert']}` |" in PAGE
        assert tested[rule["alert"]] == {True, False}, rule["alert"]
    assert set(re.findall(r"^\| `(Batchwright\w+)` \|", PAGE, re.MULTILINE)) == {rule["alert"] for rule in rules()}
    assert tested.keys() == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", str(RULES)), pytest.param(("test", "rules", str(RULE_TESTS)), marks=pytest.mark.thorough)],
)
def test_promtool_accepts_the_rules(promtool: str, arguments: tuple[str, ...]) -> None:
    """The rules are valid, and fire in their unit tests when they should, and only then."""
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_queries_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    """Each is valid with the variables as Grafana fills them in."""
    filled = [
        expression.replace("$__rate_interval", "5m").replace("$instance", "api|worker") for _, expression in targets()
    ]
    recorded = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(filled)]
    (file := tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the dashboard ---


def test_panels_fill_the_grid_and_cover_nothing() -> None:
    """Each lies within the columns, over no other one, and has an id of its own."""
    cells: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        for cell in itertools.product(columns, lines):
            assert cell not in cells, (panel["title"], cells[cell])
            cells[cell] = panel["title"]
    assert len(cells) == COLUMNS * (max(line for _, line in cells) + 1)
    identifiers = [panel["id"] for panel in panels()]
    assert len(set(identifiers)) == len(identifiers)


def test_every_panel_says_what_it_shows() -> None:
    """A title of its own, a description, a unit, and queries to the data source that the reader chooses."""
    shown = [panel for panel in panels() if panel["type"] != "row"]
    assert len({panel["title"] for panel in shown}) == len(shown)
    for panel in shown:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in {"none", "s", "percentunit", "reqps"}, panel["title"]
        assert panel["targets"], panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"]), panel["title"]


def test_every_family_of_metrics_is_shown_or_left_out_by_name(scrape: Labels) -> None:
    """A new metric gets a panel; only the version and what gives its own panel twice have none."""
    left_out = {"batchwright_build_info", "batchwright_device_busy", "batchwright_fleet_up"}
    left_out.add("batchwright_fleet_report_age_seconds")  # as the state of the cluster, in alerts
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in scrape if name.startswith("batchwright_")}
    used = {re.sub(r"_(bucket|sum|count|total)$", "", name) for _, it in targets() for name, _ in selectors(it)}
    assert families - used - left_out == set()
    assert used <= families
