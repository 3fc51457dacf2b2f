"""Tests of what a tag has to agree with before a release is built: the version, and the date in the changelog."""

import pytest
import yaml

from tests.support.paths import ROOT
from tools.release_check import changelog_problems, newest_section, tag_problems, version

DATED = "# Changes\n\n## 0.2.0 - 2026-01-31\n\n- New.\n\n## 0.1.0 - unreleased\n"


def test_a_tag_of_the_version_with_a_dated_section_is_released() -> None:
    """Only the newest section is read: older ones may be written as they like."""
    assert tag_problems("v0.2.0", DATED, "0.2.0") == []


@pytest.mark.parametrize("tag", ["0.2.0", "v0.1.0", "v0.2.0rc1", "V0.2.0", ""])
def test_a_tag_that_is_not_the_version_is_refused(tag: str) -> None:
    """The message has both."""
    (problem,) = tag_problems(tag, DATED, "0.2.0")
    assert f"the tag is {tag}," in problem
    assert "asks for v0.2.0" in problem


@pytest.mark.parametrize("marked", [" - unreleased", "", " - 31 January 2026", " - 20260131", " - 2026-02-30"])
def test_a_newest_section_without_an_iso_date_is_refused(marked: str) -> None:
    """Marked `unreleased`, without any date, with another way of writing it, or with a day that no calendar has."""
    (problem,) = tag_problems("v0.2.0", DATED.replace(" - 2026-01-31", marked), "0.2.0")
    assert "CHANGELOG.md" in problem
    assert (marked.removeprefix(" - ") or "nothing") in problem


def test_a_changelog_that_begins_with_another_version_is_refused() -> None:
    """With a tag and without one; an empty changelog begins with none."""
    assert changelog_problems(DATED, "0.2.0") == []
    assert changelog_problems(DATED, "0.1.0") == ["CHANGELOG.md does not begin with 0.1.0"]
    assert changelog_problems("# Changes\n", "0.1.0") != []


def test_the_changelog_begins_with_the_version() -> None:
    """As the check of a release reads it."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert newest_section(text)[0] == version()


def test_a_pushed_tag_is_checked_and_its_distributions_are_kept() -> None:
    """By the command that a contributor runs, with no right to write anywhere."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text.replace("\non:", '\n"on":'))
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ['make release-check TAG="$GITHUB_REF_NAME"']
    assert job["steps"][-1]["with"]["path"] == "dist/"
    assert 'python tools/release_check.py $(if $(TAG),--tag "$$TAG")' in (ROOT / "Makefile").read_text()
