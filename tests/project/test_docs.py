"""The documents of docs/: every page runs as a reader would follow it, and the site is built and complete."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from batchwright.client import Client
from batchwright.errors import ExportRefusal
from batchwright.planning import search
from batchwright.planning.stages import undivided_batch
from batchwright_service import errors
from batchwright_service.observability.collectors import (
    backlog_families,
    device_families,
    fleet_families,
    queue_families,
    readiness_families,
)
from batchwright_service.observability.metrics import Metrics
from batchwright_service.problem_mapping import _TUNER_ERRORS
from batchwright_service.settings import Settings
from batchwright_service.store.outbox.deliveries import Backlog
from batchwright_service.worker import runner
from tests.support.documents import Block, Reader, blocks_of, commands_of, matches
from tests.support.factories import mlp_spec, tuning_request
from tests.support.paths import OPENAPI, ROOT
from tests.support.service.processes import LISTENS, spoken

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS).with_suffix("")): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
SHORT = {"deployment", "library", "side-by-side", "troubleshooting"}
"""Pages that take less than three seconds to follow."""
RUN = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.thorough)
    for name, text in PAGES.items()
    if name != "start" and any(it.reason is None for it in blocks_of(text))
]
MOST_NOT_RUN = 18
"""Blocks that no test runs, over all pages; four of them need a Docker engine or a cluster."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served service; gives its address."""
    data_dir = str(tmp_path_factory.mktemp("service"))
    with spoken(["-m", "batchwright", "serve", "--port", "0"], LISTENS, {"BATCHWRIGHT_DATA_DIR": data_dir}) as served:
        yield served.url


@pytest.fixture(scope="module")
def service_with_recommendation(service: str) -> str:
    """The service after one tuning."""
    with Client(service) as client:
        client.tunings.wait(client.tunings.submit(tuning_request(mlp_spec(), max_micro_batch_size=4)).id)
    return service


@pytest.mark.parametrize("page", RUN)
def test_the_page_runs(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its commands and programs, from top to bottom in an empty folder, print what it shows."""
    reader = Reader(tmp_path, lambda: str(request.getfixturevalue("service_with_recommendation")))
    for block in blocks_of(PAGES[page]):
        if block.reason is None:
            reader.assert_works(block)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, service: str) -> Path:
    """The folder of a reader of the first page, where each command printed what the page shows."""
    folder = tmp_path_factory.mktemp("start")
    reader = Reader(folder, lambda: service)
    for block in blocks_of(PAGES["start"]):
        if block.reason is None:
            reader.assert_works(block)
    return folder


def test_the_first_page_leads_to_a_plan_and_a_run(started: Path) -> None:
    """A reader has tuned, and trained three updates with the plan."""
    found = json.loads((started / "recommendation.json").read_text())
    assert sum(found["plan"]["micro_batch_sizes"][0]) == 100
    assert len((started / "runs/first/progress.jsonl").read_text().splitlines()) == 3


def test_few_blocks_are_not_run() -> None:
    """Each says why."""
    left_out = [it for text in PAGES.values() for it in blocks_of(text) if it.reason is not None]
    assert len(left_out) <= MOST_NOT_RUN
    assert all(len(str(it.reason)) > 10 for it in left_out)


# --- the site ---


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, where a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    """Each document becomes a page, and the first one leads to all others."""
    assert {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")} == set(PAGES) | {"404"}
    linked = set(re.findall(r"\]\(([\w/-]+)\.md\)", PAGES["index"]))
    assert linked == set(PAGES) - {"index"}


def test_nothing_is_loaded_from_another_origin(site: Path) -> None:
    """No script, style, picture or frame; the theme's one script that would fetch a renderer finds no diagram."""
    pages = {path.name: path.read_text() for path in site.rglob("*.html")}
    loading = (
        r'<(?:script|img|iframe|source|link rel="(?:stylesheet|preconnect|icon)")[^>]*(?:src|href|srcset)="https?:'
    )
    assert {name for name, text in pages.items() if re.search(loading, text)} == set()
    assert {
        name for name, text in pages.items() if 'class="mermaid"' in text or "data-md-component=source" in text
    } == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?https?:", styles) == []


def test_the_reference_has_every_setting(site: Path) -> None:
    """By its name, out of the docstrings of the settings."""
    text = (site / "operations.html").read_text()
    assert {name for name in Settings.model_fields if f"Settings.{name}" not in text} == set()


# --- tables that repeat what the code says ---


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table in a section of a page, without its head."""
    section = re.split(r"\n#+ ", PAGES[page].partition(f"# {heading}\n")[2])[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_every_route_is_listed() -> None:
    """With the summary that the OpenAPI document has."""
    paths = json.loads(OPENAPI.read_text())["paths"]
    served = [
        [f"`{verb.upper()} {path}`", operation["summary"]]
        for path, operations in paths.items()
        for verb, operation in operations.items()
    ]
    assert sorted(rows("http", "Routes")) == sorted(served)


def test_every_metric_is_listed() -> None:
    """As Prometheus names it; no other is."""
    metrics = Metrics("0")
    metrics.collect("the queue", list, queue_families)
    metrics.collect("the fleet", list, fleet_families)
    metrics.collect("webhooks", lambda: Backlog(0, 0, 0.0), backlog_families)
    metrics.collect("the devices", list, partial(device_families, lease_seconds=15.0))
    metrics.collect("the readiness", lambda: True, readiness_families)
    metrics.collect_disks({})
    families = [it for it in metrics.registry.collect() if it.name.startswith("batchwright_")]
    names = {f"{it.name}_total" if it.type == "counter" else it.name for it in families}
    assert {cells[0].strip("`") for cells in rows("operations", "Metrics")} == names
    used = re.findall(r"\bbatchwright_(?!service\b)[a-z_]+", PAGES["operations"])
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= names


def test_every_code_of_a_problem_is_explained() -> None:
    """Those of the service, of failed work, of the library and of exports, in alphabetical order."""
    kinds = [it for module in (errors, runner) for it in vars(module).values() if isinstance(it, type)]
    codes = {kind.code for kind in kinds if issubclass(kind, errors.ServiceError)}
    codes |= {code for *_, code, _ in _TUNER_ERRORS}
    codes |= {f"export-{reason}" for reason in get_args(ExportRefusal)}
    codes |= {undivided_batch._REASON} | {reason for reason, *_ in search._REMEDIES.values()}
    assert [cells[0].strip("`") for cells in rows("troubleshooting", "Codes of problems")] == sorted(codes)


# --- the reader itself ---


def test_blocks_are_found_with_their_titles_and_reasons() -> None:
    """A title is a file's name, and a comment before a block says why it is not run."""
    text = '# Page\n\n```yaml title="a.yaml"\nx: 1\n```\n\n<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n'
    assert blocks_of(text) == [
        Block("yaml", "x: 1\n", "a.yaml", 3, None),
        Block("bash", "false\n", None, 8, "needs a GPU"),
    ]


def test_a_file_of_the_repository_is_included() -> None:
    """A block has the text of the file, and an unknown file is an error."""
    (block,) = blocks_of('```python title="a.py"\n--8<-- "examples/own_loop.py"\n```\n')
    assert block.text == (ROOT / "examples" / "own_loop.py").read_text()
    with pytest.raises(FileNotFoundError):
        blocks_of('```python\n--8<-- "examples/no_loop.py"\n```\n')


def test_commands_are_found_with_what_they_print() -> None:
    """Lines after a backslash belong to the command, and so do here-documents."""
    (first, second, third) = commands_of("$ echo a \\\n    b\na b\n$ true\n$ cat <<'END'\nx\nEND\nx\n")
    assert (first.line, first.prints) == ("echo a \\\n    b", "a b\n")
    assert (second.line, second.prints) == ("true", "")
    assert (third.line, third.prints) == ("cat <<'END'\nx\nEND", "x\n")


def test_numbers_may_differ_and_words_may_not() -> None:
    """Dots stand for any lines, and for none; a missing or an additional line is found."""
    assert matches("probe 46  FIT  1.62\n...\ndone\n", "probe 47 FIT 0.1\ndone\n")
    assert matches("a\n...\nz\n", "a\nb\nc\nz\n")
    assert not matches("probe 46  FIT\n", "probe 46  OOM\n")
    assert not matches("a\n", "a\nb\n")
    assert not matches("a\nb\n", "a\n")


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    """A command that fails or prints something else, a program that raises, and a file that is no YAML."""
    reader = Reader(tmp_path, lambda: "")
    reader.assert_works(Block("text", "words\n", "a.txt", 1, None))
    reader.assert_works(Block("console", "$ cd .\n$ cat a.txt\nwords\n$ cat a.txt\n", None, 1, None))
    for language, text in {
        "console": "$ cat b.txt\n",
        "bash": "false\ntrue\n",
        "python": "raise ValueError\n",
    }.items():
        with pytest.raises(AssertionError, match="ended with 1"):
            reader.assert_works(Block(language, text, None, 1, None))
    with pytest.raises(AssertionError, match="instead of"):
        reader.assert_works(Block("console", "$ cat a.txt\nother\n", None, 1, None))
