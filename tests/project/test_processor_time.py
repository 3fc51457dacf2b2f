"""The budget of processor time: a test that takes too much fails, and so does a session above its budget."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processor_time
from tests.support.paths import ROOT
from tests.support.processor_time import CACHE_KEY, RUN_ELSEWHERE, by_group, main, processor_seconds

MAKEFILE = (ROOT / "Makefile").read_text()
SPIN = """
import subprocess, sys, time
import pytest
from tests.support import processor_time
processor_time.REFERENCE_SECONDS = 1e9  # no machine is slower than the reference

CHILD = "import sys, time\\nwhile time.process_time() < 0.2: pass\\nprint(flush=True); sys.stdin.read()"

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
"""
LIMITED = (
    SPIN
    + """
processor_time.TEST_LIMIT_SECONDS = 0.15

@pytest.fixture(scope="module")
def shared(): spin(0.2)

@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        yield running

def test_own(): spin(0.2)
def test_ended_child(): subprocess.run([sys.executable, "-c", CHILD], stdin=subprocess.DEVNULL)
def test_living_child(child): child.stdout.readline()
def test_other_failure(): spin(0.2); assert not "its own reason"
@pytest.mark.thorough
def test_marked(): spin(0.2)
def test_of_shared(shared): pass
def test_waits(): time.sleep(0.3)
"""
)


def run_tests(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest with the plugin, on a module of this text."""
    (folder / "test_work.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    thorough: long\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.processor_time", "-p", "xdist", "-rA"]
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), *arguments, str(folder / "test_work.py")]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the other plugins take most of the time
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_a_test_above_the_limit_fails_and_says_what_to_do(tmp_path: Path) -> None:
    """Child processes count, dead or alive; shared fixtures, waiting and tests marked `thorough` do not."""
    done = run_tests(tmp_path, LIMITED, "--processor-budget", "1000")
    outcomes = {name: outcome for outcome, name in re.findall(r"^(\w+ED) .*::test_(\w+)", done.stdout, re.MULTILINE)}
    above = ("own", "ended_child", "living_child", "other_failure")
    assert outcomes == dict.fromkeys(above, "FAILED") | dict.fromkeys(("marked", "of_shared", "waits"), "PASSED")
    sections = done.stdout.partition(" short test summary ")[0]
    assert sections.count("The limit in `make test` is 0.15 s. Make the test cheaper, or mark it `thorough`") == 3
    assert "its own reason" in done.stdout
    assert re.search(
        r"^Processor time: \d s, \d s of it outside of tests\. The budget is 1000 s\.$", done.stdout, re.MULTILINE
    )


def test_a_session_above_its_budget_fails_and_names_the_dearest_files(tmp_path: Path) -> None:
    """Also where its tests ran in other processes, which all passed."""
    done = run_tests(tmp_path, SPIN + "def test_spins(): spin(0.3)\n", "--processor-budget", "0.1", "-n", "1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in done.stdout
    assert "FAILED: over the budget of processor time. The dearest files:" in done.stdout
    assert re.search(r"^ +0\.\d s +1 tests  test_work\.py$", done.stdout, flags=re.MULTILINE)


def test_seconds_count_for_less_on_a_slower_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of a fixed computation; a faster machine has no more to spare than the reference machine."""
    monkeypatch.setattr(processor_time, "REFERENCE_SECONDS", 1e-4)
    assert processor_time.slowness() > 10
    monkeypatch.setattr(processor_time, "REFERENCE_SECONDS", 1e9)
    assert processor_time.slowness() == 1


def test_the_seconds_are_kept_by_test_and_printed_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dearest group first, with the number of its tests and what its shared fixtures took."""
    found = by_group(
        {"tests/a/x.py::one": 1.0, "tests/a/y.py": 2.5, "tests/b/z.py::two": 9.0, "tests/b/z.py::three": 0}, 2
    )
    assert list(found.items()) == [("tests/b", (2, 9.0)), ("tests/a", (1, 3.5))]
    kept = tmp_path / ".pytest_cache" / "v" / CACHE_KEY
    kept.parent.mkdir(parents=True)
    kept.write_text('{"tests/a/x.py::one": 1.4, "collection": 3.0}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["processor_time"])
    main()
    assert capsys.readouterr().out == "| collection | 0 | 3 |\n| tests/a | 1 | 1 |\n"


def test_the_time_of_a_child_counts_once() -> None:
    """While it lives and after it was waited for; time does not run backwards when it ends."""
    before = processor_seconds()
    code = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = processor_seconds() - before
    after = processor_seconds() - before
    assert alive > 0.35
    assert alive - 0.05 < after < alive + 0.35


def test_make_test_has_a_budget_and_excludes_what_the_plugin_does_not_judge() -> None:
    """The markers that no limit holds for are those that `make test` leaves out, or skips without the hardware."""
    rule = MAKEFILE.partition("\ntest: ")[2].partition("\n\n")[0]
    assert "--processor-budget 1400" in rule
    selected = re.findall(r"^addopts = .*-m '(.*)'", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert {f"not {name}" for name in RUN_ELSEWHERE} - set(selected[0].split(" and ")) == {"not gpu", "not virtual_gpu"}
