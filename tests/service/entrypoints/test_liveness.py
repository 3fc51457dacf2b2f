"""`batchwright health`: a check that knows what runs here, whatever its command, address and data folder."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from batchwright_service.entrypoints.liveness import api_url, check_alive, recorded, renew
from batchwright_service.errors import NotReadyError
from tests.support.command import called
from tests.support.service.processes import LISTENS, spoken, wait_until

WORKS = r"Batchwright works on (\S+)"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the records of a test apart from those of this machine, as a container does."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_nothing_that_runs_is_unhealthy() -> None:
    """Exit code 1, on which a container is unhealthy; the message names the commands."""
    done = called("health")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no process of `batchwright serve` or `batchwright work` runs here" in done.stderr


@pytest.mark.usefixtures("starts")
def test_an_api_is_asked_at_its_own_address(tmp_path: Path, own_folder: Path) -> None:
    """On a port that the system picked; and no longer, once the process has ended."""
    environment = {"BATCHWRIGHT_DATA_DIR": str(tmp_path / "data"), "TMPDIR": str(own_folder)}
    with spoken(["-m", "batchwright", "serve", "--port", "0", "--no-worker"], LISTENS, environment) as api:
        done = called("health")
        assert done.returncode == 0, done.stderr
        assert f"responds at {api.url}/livez" in done.stdout
    assert called("health").returncode == 1


def test_a_worker_is_healthy_without_an_address() -> None:
    """A record that is renewed is healthy; one that is not is unhealthy, with its age."""
    with recorded("work") as file:
        assert file is not None
        assert check_alive() == [f"batchwright work (process {os.getpid()}) reported 0 s ago"]
        old = file.stat().st_mtime - 3600.0
        os.utime(file, (old, old))
        with pytest.raises(NotReadyError, match=r"last reported 3\d\d\d s ago \(limit 30 s\)"):
            check_alive()
        renew(file)
        assert len(check_alive()) == 1


def test_an_api_that_does_not_respond_is_unhealthy_beside_a_worker() -> None:
    """Every process counts: a worker that is well does not hide an API that is not."""
    with socket.create_server(("127.0.0.1", 0)) as refused:
        port = refused.getsockname()[1]
    with recorded("work") as file:
        assert file is not None
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with other:
            record = json.loads(file.read_text())
            start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
            record |= {"pid": other.pid, "start_ticks": int(start), "command": "serve", "url": api_url("0.0.0.0", port)}  # noqa: S104
            file.with_name("0.json").write_text(json.dumps(record))
            with pytest.raises(
                NotReadyError, match=rf"serve \(process {other.pid}\) does not respond at .*:{port}/livez"
            ):
                check_alive()
            assert other.stdin is not None
            other.stdin.close()
        assert len(check_alive()) == 1  # the other process has ended, and its record with it


def test_a_record_of_an_earlier_process_does_not_count() -> None:
    """A container that starts again may find the records of its predecessor, whose ids are given anew."""
    with recorded("work") as file:
        assert file is not None
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"start_ticks": record["start_ticks"] - 1}))
        with pytest.raises(NotReadyError, match="no process"):
            check_alive()


def test_a_process_removes_the_records_of_killed_ones() -> None:
    """Otherwise a host on which processes are killed again and again would keep a file of each."""
    with recorded("serve") as file:
        assert file is not None
        record = json.loads(file.read_text())
        of_killed = file.with_name("1.json")
        of_killed.write_text(json.dumps(record | {"start_ticks": record["start_ticks"] - 1}))
        with recorded("serve"):
            assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_process_works_without_a_record(own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that cannot be used stops no service: the log says that the check will not find the process."""
    (own_folder / f"batchwright-{os.getuid()}").touch()
    with recorded("work") as file:
        assert file is None
        renew(file)
    assert "will not find this process" in caplog.text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),  # noqa: S104
        ("::", "http://[::1]:1"),
        ("127.0.0.2", "http://127.0.0.2:1"),
        ("fd00::17", "http://[fd00::17]:1"),
    ],
)
def test_every_address_is_reached_from_here(host: str, url: str) -> None:
    """A process that listens on every address is asked on loopback, another one on its address."""
    assert api_url(host, 1) == url


@pytest.mark.usefixtures("starts")
def test_a_worker_renews_its_record(tmp_path: Path, own_folder: Path) -> None:
    """`work` is healthy from its start, and renews the record while its threads run."""
    environment = {"BATCHWRIGHT_DATA_DIR": str(tmp_path / "data"), "TMPDIR": str(own_folder)}
    with spoken(["-m", "batchwright", "work", "--device", "cpu"], WORKS, environment):
        wait_until(lambda: called("health").returncode == 0)
        (file,) = own_folder.glob("*/*.json")
        first = file.stat().st_mtime
        wait_until(lambda: file.stat().st_mtime > first)
