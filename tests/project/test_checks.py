"""Checks before a commit and in continuous integration: the same commands everywhere, and fast tests without torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
FAST = re.findall(r"^FAST := ((?:.*\\\n)*.*)", MAKEFILE, flags=re.MULTILINE)[0].replace("\\\n", " ").split()


def fast_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest as `make check` calls it."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.fast_tests", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_fast_tests_are_found_without_torch() -> None:
    """Their modules, and all that these import, load where torch, the database and the browser cannot be imported."""
    assert [name for name in FAST if not (ROOT / name).exists()] == []
    collected = fast_tests("--collect-only", "-q", *FAST)
    assert collected.returncode == 0, collected.stdout


@pytest.mark.parametrize(
    "body",
    ["import torch", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"],
)
def test_a_fast_test_that_imports_torch_fails(tmp_path: Path, body: str) -> None:
    """Also one that imports torch only while it runs, or in a process that it starts."""
    module = tmp_path / "test_heavy.py"
    module.write_text(f"def test_heavy():\n    {body}\n")
    done = fast_tests("--rootdir", str(tmp_path), str(module))
    assert done.returncode == 1
    assert "torch is blocked by the test" in done.stdout


def test_make_check_lints_and_runs_the_fast_tests() -> None:
    """It needs `lint`, and calls pytest with the plugin that blocks torch."""
    rule = MAKEFILE.partition("\ncheck: ")[2].partition("\n\n")[0]
    assert rule.startswith("lint ")
    assert "-p tests.support.fast_tests" in rule
    assert "$(FAST)" in rule


def test_hooks_call_the_tools_of_lint() -> None:
    """Each hook of pre-commit is a line of `make lint`, out of `.venv`; the one that formats does not only check."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    lint = MAKEFILE.partition("\nlint: ")[2].partition("\n\n")[0].replace("$(BIN)", ".venv/bin")
    lines = [line.strip().removesuffix(" .").replace(" --check", "") for line in lint.splitlines()[1:]]
    assert [hook["entry"] for hook in hooks] == lines


def test_the_workflow_runs_what_contributors_run() -> None:
    """On the oldest Python that is supported: `make check`, and `.ci/run` with the README's command."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == ["make check", ".ci/run"]
    versions = {step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")}
    assert versions == {"3.11"}
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()


FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_valid(form: Path) -> None:
    """Each has a name, a description, and questions with labels and with ids of their own."""
    document = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(document)
    questions = [it for it in document["body"] if it["type"] != "markdown"]
    assert {it["type"] for it in questions} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(it["attributes"]["label"] for it in questions)
    assert len({it["id"] for it in questions}) == len(questions) > 0


def test_the_pull_request_template_names_targets_that_exist() -> None:
    """As the other documents do."""
    text = (ROOT / ".github" / "pull_request_template.md").read_text()
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
