"""Settings as an operator meets them: options over variables over defaults, and no variable that nothing reads."""

import re
import socket
from pathlib import Path

import pytest

from batchwright.errors import SpecError
from batchwright.system.own_variables import OTHER_VARIABLES
from batchwright_service.settings import Settings, read_settings, unknown_variables
from tests.support.command import called
from tests.support.paths import ROOT
from tests.support.service.processes import LISTENS, spoken


@pytest.mark.usefixtures("starts")
def test_serve_listens_where_variables_say(tmp_path: Path) -> None:
    """Host and port of the environment, when the command names none."""
    environment = {
        "BATCHWRIGHT_HOST": "127.0.0.2",
        "BATCHWRIGHT_PORT": "0",
        "BATCHWRIGHT_DATA_DIR": str(tmp_path),
        "BATCHWRIGHT_WORKER": "false",
    }
    with spoken(["-m", "batchwright", "serve"], LISTENS, environment) as started:
        assert started.url.startswith("http://127.0.0.2:")
        assert not started.url.endswith(":8000")


def test_options_have_precedence_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is not given leaves the variable, and a variable that is not set the default."""
    monkeypatch.setenv("BATCHWRIGHT_PORT", "9000")
    monkeypatch.setenv("BATCHWRIGHT_HOST", "127.0.0.2")
    assert read_settings(host=None, port=9001).port == 9001
    assert read_settings(host=None, port=9001).host == "127.0.0.2"
    assert read_settings().port == 9000
    monkeypatch.delenv("BATCHWRIGHT_PORT")
    assert read_settings(port=None).port == 8000


@pytest.mark.parametrize(
    "command", [("serve",), ("work",), ("admin", "keys", "list"), ("admin", "prune", "--older-than", "30d")]
)
def test_an_unknown_variable_is_refused(command: tuple[str, ...]) -> None:
    """Exit code 2, the variable and the nearest setting; its value, which may be a secret, is not shown."""
    done = called(*command, BATCHWRIGHT_PRT="3141")
    assert done.returncode == 2
    assert "BATCHWRIGHT_PRT: is not a setting; did you mean `BATCHWRIGHT_PORT`?" in done.stderr
    assert "3141" not in done.stderr


def test_every_variable_that_we_read_or_set_is_known() -> None:
    """Names in our sources and documents: settings, or listed as others."""
    places = [*(ROOT / "tuner").rglob("*.py"), *(ROOT / "service").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    places += [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "Makefile", ROOT / "docker" / "Dockerfile"]
    places += (ROOT / "docs").rglob("*.md")
    text = "\n".join(place.read_text() for place in places)
    names = set(re.findall(r"BATCHWRIGHT_[A-Z][A-Z_]*[A-Z]", text))
    assert len(names) > 15
    assert unknown_variables(dict.fromkeys(names, "")) == []


def test_other_variables_are_no_settings() -> None:
    """One name means one thing."""
    assert {f"BATCHWRIGHT_{name.upper()}" for name in Settings.model_fields} & OTHER_VARIABLES == set()


def test_the_variables_of_kubernetes_are_no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod beside a service named `batchwright` has variables of that service, one of which looks like a setting."""
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"]
    links += ["API_SERVICE_HOST", "API_PORT_80_TCP_PROTO"]
    assert unknown_variables({f"BATCHWRIGHT_{name}": "10.0.0.1" for name in links}) == []
    monkeypatch.setenv("BATCHWRIGHT_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SpecError, match=r"BATCHWRIGHT_PORT: is the address that Kubernetes .*enableServiceLinks"):
        read_settings()
    assert read_settings(port=8000).port == 8000


def test_a_wrong_setting_is_named_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option or the variable that was given, and every one of them."""
    monkeypatch.setenv("BATCHWRIGHT_LEASE_SECONDS", "0.5")
    monkeypatch.setenv("BATCHWRIGHT_LOG_FORMAT", "jsn")
    with pytest.raises(SpecError) as caught:
        read_settings(metrics_port=70_000)
    assert [str(problem) for problem in caught.value.problems] == [
        "BATCHWRIGHT_LEASE_SECONDS: must be at least 1.0 (got '0.5')",
        "BATCHWRIGHT_LOG_FORMAT: must be one of 'text', 'json'; did you mean 'json'? (got 'jsn')",
        "--metrics-port: must be at most 65535 (got 70000)",
    ]


def test_a_port_that_is_taken_names_the_address(tmp_path: Path) -> None:
    """Exit code 2, also when the port came from the environment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = called("serve", "--no-worker", BATCHWRIGHT_PORT=str(port), BATCHWRIGHT_DATA_DIR=str(tmp_path))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
