"""`batchwright tunings`, `jobs` and `recommendations`: a service from a terminal, over HTTP."""

import json
import os
import signal
import subprocess
import threading
from itertools import count
from pathlib import Path

import pytest

from batchwright.cli.errors import CommandError
from batchwright.client import ConnectionFailedError
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.cli.remote import watching
from tests.support.command import called
from tests.support.factories import gpt_spec, recommendation
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped

SIZES = count(3000)
"""Effective batch sizes that no other test asks for."""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A small spec on the disk."""
    path = tmp_path / "spec.json"
    path.write_text(gpt_spec().model_dump_json())
    return path


def at(service: Running, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command's answer at 80 columns."""
    done = called(*arguments, BATCHWRIGHT_URL=service.url)
    assert max(map(len, done.stdout.splitlines()), default=0) <= 80 or "--json" in arguments
    return done


def test_a_tuning_from_its_submission_to_its_export(shared_service: Running, spec_file: Path, tmp_path: Path) -> None:
    """Each verb once: the id leads from one to the next."""
    words = ("--effective-batch-size", str(next(SIZES)), "--device", "cpu", "--name", "Night run", "--label", "team=a")
    tuned = at(shared_service, "tunings", "submit", spec_file, *words, "--watch")
    assert tuned.returncode == 0, tuned.stderr
    assert "probe 37  FIT" in tuned.stderr
    assert "micro-batch of 37 fits" in tuned.stdout
    name = tuned.stdout.split("batchwright jobs submit ")[1].split()[0]
    (row,) = (line for line in at(shared_service, "tunings", "list", "-q", "Night").stdout.splitlines()[1:])
    tuning_id, state, *_ = row.split()
    assert state == "succeeded"
    assert row.endswith("82 x \u226437")
    assert json.loads(at(shared_service, "tunings", "show", tuning_id, "--json").stdout)["name"] == "Night run"
    assert at(shared_service, "tunings", "watch", tuning_id).returncode == 0
    assert at(shared_service, "tunings", "cancel", tuning_id).returncode == 0
    listed = at(shared_service, "recommendations", "list", "--label", "team=a", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in listed] == [name]
    saved = tmp_path / "found.json"
    assert at(shared_service, "recommendations", "show", name, "-o", saved).returncode == 0
    assert Recommendation.model_validate_json(saved.read_text()).id == name
    exported = at(shared_service, "recommendations", "export", name, "--format", "slurm", "--json")
    assert json.loads(exported.stdout)["format"] == "slurm"


def test_a_job_from_its_submission_to_its_end(shared_service: Running, tmp_path: Path) -> None:
    """From the file of a recommendation, with the updates as they are made."""
    found = tmp_path / "found.json"
    found.write_text(recommendation(gpt_spec(), 40, 2).model_dump_json())
    done = at(shared_service, "jobs", "submit", found, "--updates", "3", "--name", "first", "--watch")
    assert done.returncode == 0, done.stderr
    assert "succeeded: " in done.stdout
    (row,) = (line for line in at(shared_service, "jobs", "list", "-q", "first").stdout.splitlines()[1:])
    job_id, state, *_ = row.split()
    assert state == "succeeded"
    assert "succeeded" in at(shared_service, "jobs", "show", job_id).stdout
    assert at(shared_service, "jobs", "watch", job_id).returncode == 0
    refused = at(shared_service, "jobs", "resume", job_id)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_interrupting_the_watch_leaves_the_tuning(start_service: StartService, spec_file: Path) -> None:
    """With the commands that show it again and cancel it; cancelled, it has its own exit code."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))

    def interrupt() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    done = at(service, "tunings", "submit", spec_file, "--effective-batch-size", "100", "--device", "cpu", "--watch")
    sender.join()
    assert done.returncode == 130
    tuning_id = done.stderr.split("Interrupted. ")[1].split()[0]
    assert f"batchwright tunings watch {tuning_id}" in done.stderr
    shown = at(service, "tunings", "show", tuning_id)
    assert "running" in shown.stdout
    assert at(service, "tunings", "cancel", tuning_id).returncode == 0
    assert at(service, "tunings", "watch", tuning_id).returncode == 4


def test_a_lost_connection_names_the_command_that_watches_again() -> None:
    """The work goes on with the service, and its id is not lost with the connection."""
    with pytest.raises(CommandError, match="`batchwright jobs watch job_1`"), watching("jobs", "job_1"):
        raise ConnectionFailedError("the service cannot be reached")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tunings", "show", "tun_0"), "(not-found)"),
        (("jobs", "cancel", "job_0"), "(not-found)"),
        (("recommendations", "export", "rec_0", "--format", "slurm"), "(not-found)"),
        (("jobs", "submit", "absent.json"), "absent.json: cannot be read"),
        (("tunings", "list", "--label", "team"), "--label: must be a key and a value"),
    ],
)
def test_an_error_is_one_line_or_one_document(
    shared_service: Running, arguments: tuple[str, ...], message: str
) -> None:
    """The detail of the API's problem, or what is wrong with the arguments."""
    refused = at(shared_service, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    document = json.loads(at(shared_service, *arguments, "--json").stdout)
    assert document["message"]
    assert ("problem" in document) == ("not-found" in message)


def test_a_refused_key_names_the_variable_that_holds_it(shared_service: Running) -> None:
    """The API's own remedy is a header, which nobody types on a command line."""
    done = called("jobs", "list", BATCHWRIGHT_URL=shared_service.url, BATCHWRIGHT_API_KEY="bw_none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("(not-authenticated): set BATCHWRIGHT_API_KEY to a valid key")


def test_a_service_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its address, and the exit code of what may succeed later."""
    monkeypatch.setattr("batchwright_service.cli.remote._RETRY_SECONDS", 0.0)
    done = called("tunings", "list", "--url", "http://127.0.0.1:9")
    assert done.returncode == 5
    assert "127.0.0.1:9" in done.stderr
    malformed = called("tunings", "list", "--url", "localhost")
    assert malformed.returncode == 2
    assert "needs a scheme and a host" in malformed.stderr
