"""Tests of ``batchwright.commands.injected.written_files``: a process of a probe, and what it does to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchwright.commands.reports import Reports
from batchwright.schemas.results import WrittenFiles
from batchwright.system import startup


@dataclass
class Probe:
    """A folder of a user with two files from before the tuning, and the folder of a probe."""

    home: Path
    folder: Path

    def run(self, code: str, *, ends: bool = True) -> WrittenFiles | None:
        """Run a program in the user's folder as a process of the probe, and read what it did to files."""
        time.sleep(0.2)  # more than the kernel's clock of files lags behind
        now = time.time()
        settings = {"ends": ends, "tuning_began_at": now, "probe_began_at": now}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        self._run(code)
        return self.reports()

    def _run(self, code: str) -> None:
        environment = {
            "PYTHONPATH": str(Path(startup.__path__[0])),
            "BATCHWRIGHT_PROBE_FOLDER": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "HF_HOME": str(self.home / "hub"),
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=self.home, check=False, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")

    def again(self, code: str) -> WrittenFiles | None:
        """Run another probe of the same tuning."""
        time.sleep(0.2)
        path = self.folder / "settings.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "probe_began_at": time.time()}))
        for events in (self.folder / "events").iterdir():
            events.unlink()
        self._run(code)
        return self.reports()

    def reports(self) -> WrittenFiles | None:
        """What the processes reported."""
        reports = Reports(self.folder / "events")
        reports.read()
        return reports.files


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """A probe of a user with the files `last.pt` and `log.txt`."""
    home, folder = tmp_path / "home", tmp_path / "probe"
    for path in (home / "hub", home / "runs", folder / "events", folder / "tmp"):
        path.mkdir(parents=True)
    for name in ("last.pt", "log.txt", "runs/old"):
        (home / name).write_text("of the user")
    (home / "latest").symlink_to("log.txt")
    return Probe(home, folder)


@pytest.mark.parametrize(
    ("code", "replaced", "changed", "made"),
    [
        ("open('last.pt', 'w')", "last.pt", "", ""),
        ("import os; os.close(os.open('last.pt', os.O_WRONLY | os.O_TRUNC))", "last.pt", "", ""),
        ("from pathlib import Path; Path('last.pt').write_bytes(b'1')", "last.pt", "", ""),
        ("import os; open('new', 'w').close(); os.replace('new', 'last.pt')", "last.pt", "", "new"),
        ("import os; os.rename('last.pt', 'kept.pt')", "last.pt", "", "kept.pt"),
        ("import os; os.remove('last.pt')", "last.pt", "", ""),
        ("import os; os.truncate('last.pt', 0)", "last.pt", "", ""),
        ("import os; os.remove('latest'); os.symlink('last.pt', 'latest')", "", "latest", "latest"),
        ("import shutil; shutil.rmtree('runs')", "runs/old", "", ""),
        ("import shutil; shutil.copy('log.txt', 'last.pt')", "last.pt", "", ""),
        (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'open(\"last.pt\", \"w\")'])",
            "last.pt",
            "",
            "",
        ),
        ("import os\nif not os.fork(): open('last.pt', 'w')\nelse: os.wait()", "last.pt", "", ""),
        ("open('log.txt', 'a')", "", "log.txt", ""),
        ("open('log.txt', 'a').write('x'); open('log.txt', 'w')", "log.txt", "log.txt", ""),
        ("open('last.pt', 'r+')", "", "last.pt", ""),
        ("import sqlite3; sqlite3.connect('runs/db').close(); sqlite3.connect(':memory:').close()", "", "", "runs/db"),
        ("open('new', 'w').close(); open('new', 'w').close()", "", "", "new"),
        ("import os; os.mkdir('a'); open('a/x', 'w').close(); os.rename('a', 'b'); os.remove('b/x')", "", "", "a/x b"),
        ("open('last.pt').read(); open('/dev/null', 'w'); open('hub/x', 'w')", "", "", ""),
        (
            "import os, tempfile; open(os.environ['BATCHWRIGHT_PROBE_FOLDER'] + '/x', 'w'); tempfile.mkstemp()",
            "",
            "",
            "",
        ),
    ],
)
def test_files_of_the_user_are_told_by_what_became_of_them(
    code: str, replaced: str, changed: str, made: str, probe: Probe
) -> None:
    """The files of the probe itself, of caches and of devices are left out."""
    found = probe.run(code) or WrittenFiles()

    assert [found.replaced, found.changed, found.made] == [
        tuple(str(probe.home / name) for name in names.split()) for names in (replaced, changed, made)
    ]


def test_a_file_of_an_earlier_probe_is_none_of_the_user(probe: Probe) -> None:
    """It is named, and nothing of the user is lost."""
    probe.run("open('new', 'w').write('x')")
    found = probe.again("open('new', 'w').write('x')")

    assert found is not None
    assert (found.replaced, found.remade) == ((), (str(probe.home / "new"),))


def test_many_files_are_counted_and_few_are_named(probe: Probe) -> None:
    """A program that unpacks its data leaves a short result."""
    found = probe.run("for number in range(300): open(f'new{number}', 'w').close()")

    assert found is not None
    assert len(found.made) == 20
    assert found.counts == {"made": 256}  # the last power of two
    assert found.in_words.endswith("new2 and 253 more")


def test_a_job_is_not_watched(probe: Probe) -> None:
    """It writes where the user wants it to."""
    assert probe.run("open('last.pt', 'w')", ends=False) is None


def test_a_file_is_named_once_for_all_probes_of_a_tuning() -> None:
    """By the worst that happened to it."""
    first = WrittenFiles(made=("a", "b"), counts={"made": 30})
    second = WrittenFiles(replaced=("a",), remade=("b",), counts={"replaced": 1, "remade": 1})

    assert WrittenFiles.of_all([first, second]).in_words == "replaced or removed a; made b and 29 more"
