"""Models of the hub: `huggingface_hub` itself fetches them from a small hub of this test, in processes of their own.

`huggingface_hub` reads its variables once, when it is imported.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM

from batchwright.errors import SpecError
from batchwright.planning.fingerprint import fingerprint, request_fingerprint
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import TransformersModel, parse_spec
from batchwright_service.application.rules.policy import Policy
from batchwright_service.application.work import model_name
from batchwright_service.errors import DataPathNotAllowedError, HubModelNotAllowedError
from tests.support.factories import CPU
from tests.support.paths import ROOT
from tests.workloads.pretrained.test_pretrained import GPT2, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {"kind": "transformers", "task": "causal-lm", "pretrained": "acme/tiny"}
TEXT = {"kind": "text", "paths": ["text.txt"], "tokenizer": "pretrained"}
FILE = re.compile(r"/acme/tiny/resolve/([^/]+)/([\w.-]+)")
LIST = re.compile(rf"/api/models/acme/tiny/tree/{COMMIT}")


@dataclass
class Hub:
    """A hub with one model, of one commit."""

    folder: Path
    address: str
    asked: list[str]
    """Paths of the files that were sent."""
    breaks_off: bool = False
    """True if the connection ends in the middle of a file."""


class _Handler(BaseHTTPRequestHandler):
    """The answers of a hub: the header and the content of a file, and the list of files."""

    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Say nothing."""

    def _answer(self) -> None:
        if (file := FILE.match(self.path)) and file[1] not in {"main", COMMIT}:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif file and (path := self.hub.folder / file[2]).is_file():
            if self.command == "GET":
                self.hub.asked.append(file[2])
            content = path.read_bytes()
            self._send(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})
        elif file:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif LIST.match(self.path):
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
                for path in self.hub.folder.iterdir()
            ]
            self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if self.hub.breaks_off else content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub on this machine, with code and another format of the weights beside the model."""
    folder = tmp_path / "hub"
    save(folder, {**GPT2, "vocab_size": 8})  # too few for the 256 ids of bytes
    config = json.loads((folder / "config.json").read_text())
    published = {"auto_map": {"AutoConfig": "code.Config"}, "is_of_the_hub": True}
    (folder / "config.json").write_text(json.dumps(config | published))
    (folder / "code.py").write_text("raise SystemExit('the code was run')\n")
    (folder / "pytorch_model.bin").write_bytes(b"not fetched")
    tokenizer = Tokenizer(WordLevel({"the": 0, "same": 1, "words": 2, "?": 3}, unk_token="?"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    found = Hub(folder, f"http://127.0.0.1:{server.server_port}", [])
    _Handler.hub = found
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def batchwright(hub: Hub, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line beside the hub, with a cache in the folder of the test."""
    given = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(hub.folder.parent / "cache"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "batchwright", *arguments],
        env={**given, "PYTHONPATH": str(ROOT)},
        cwd=hub.folder.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def write_spec(folder: Path, **changes: Any) -> str:
    """A spec that trains the model of the hub on a text; its path."""
    (folder / "text.txt").write_text("the same words again and again " * 40)
    spec = {"model": MODEL, "batch": {"sequence_length": 16}, "data": TEXT}
    (folder / "spec.json").write_text(json.dumps({**spec, **changes}))
    return "spec.json"


FETCHING = """
import json, sys
from batchwright.schemas.workload import parse_spec
from batchwright.workloads.pretrained.folder_config import with_pretrained_config
from batchwright.workloads.pretrained.hub_files import fetch_model
model = with_pretrained_config(parse_spec(json.loads(sys.argv[1]))).model
folder = fetch_model(model.hub_model) if model.revision else None
print(json.dumps([model.pretrained, model.revision, model.config, str(folder)]))
"""


def fetched(hub: Hub, model: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """Read the config of a model into a spec and fetch the model, as a run does, without torch."""
    spec = {"model": {**MODEL, **model}, "batch": {"sequence_length": 16}, "data": TEXT}
    given = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(hub.folder.parent / "cache"), **environment}
    return subprocess.run(
        [sys.executable, "-c", FETCHING, json.dumps(spec)],
        env={**given, "PYTHONPATH": str(ROOT)},
        cwd=hub.folder.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_model_is_fetched_at_a_commit(hub: Hub) -> None:
    """The config and the files of the model, and no code. What was fetched suffices without a network."""
    done = fetched(hub, {})
    assert done.returncode == 0, done.stderr
    name, revision, config, folder = json.loads(done.stdout)
    assert (name, revision, Path(folder).name, config["vocab_size"]) == ("acme/tiny", COMMIT, COMMIT, 8)
    assert sorted(hub.asked) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    again = fetched(hub, {}, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout, again.stderr
    assert len(hub.asked) == 4


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # peft calls what transformers has deprecated
def test_a_run_starts_from_a_commit_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Config, weights and tokenizer are fetched, no code, and the recommendation, the note and the adapter name it.

    What was fetched suffices without a network. The adapter loads above the model.
    """
    spec = write_spec(tmp_path, adapter={"kind": "lora", "rank": 2, "target_modules": ["c_attn"]})
    options = ["--effective-batch-size", "4", "--updates", "1", "--device", "cpu", "--memory-limit", "1GiB"]
    done = batchwright(hub, "run", spec, *options, "--output-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    recommendation = json.loads((tmp_path / "run/recommendation.json").read_text())
    model = recommendation["request"]["spec"]["model"]
    assert (model["pretrained"], model["revision"], model["config"]["vocab_size"]) == ("acme/tiny", COMMIT, 8)
    assert "Probes had random weights" in recommendation["evidence"]["proof"]["statement"]
    assert sorted(set(hub.asked)) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    digest = hashlib.sha256((hub.folder / "model.safetensors").read_bytes()).hexdigest()
    digest = hashlib.sha256(f"model.safetensors {digest}\n".encode()).hexdigest()
    result = (tmp_path / "run/result.json").read_text()
    assert f"training starts from the weights of acme/tiny at {COMMIT} (SHA-256 {digest})" in result
    adapter = json.loads((tmp_path / "run/pretrained/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("acme/tiny", COMMIT)
    copied, sent = tmp_path / "run/pretrained/tokenizer.json", hub.folder / "tokenizer.json"
    assert copied.read_bytes() == sent.read_bytes()
    asked = len(hub.asked)
    again = batchwright(hub, "run", spec, *options, "--output-dir", "again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(hub.asked) == asked
    base = AutoModelForCausalLM.from_pretrained(hub.folder)
    from peft import PeftModel

    assert PeftModel.from_pretrained(base, tmp_path / "run/pretrained")


troubles = pytest.mark.parametrize(
    ("model", "environment", "message"),
    [
        ({"pretrained": "acme/none"}, {}, "acme/none.* does not exist, or is private"),
        ({"revision": "older"}, {}, "has no revision 'older'"),
        ({}, {"HF_HUB_OFFLINE": "1"}, "is not in the cache, and HF_HUB_OFFLINE is set"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:1"}, "could not be fetched from http://127.0.0.1:1"),
        ({"config": {"n_layers": 3}}, {}, "did you mean n_layer"),
    ],
)


@troubles
def test_a_model_that_cannot_be_had_is_told_in_words(
    hub: Hub, model: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    """A wrong name or revision, no network, and a misspelt field."""
    done = fetched(hub, model, **environment)
    assert done.returncode != 0
    assert re.search(r"(SpecError|HubUnavailableError): invalid spec", done.stderr)
    assert re.search(message, " ".join(done.stderr.split())), done.stderr


def test_a_connection_that_breaks_off_is_told_in_words(hub: Hub) -> None:
    """After the attempts that the client makes by itself."""
    hub.breaks_off = True
    code = (
        "from batchwright.workloads.pretrained.hub_files import *; fetch_config(HubModel('acme/tiny'), 'config.json')"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(hub.folder.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "HubUnavailableError: invalid spec:\n  model.pretrained: there is no folder 'acme/tiny'" in done.stderr
    assert f"could not be fetched from {hub.address}" in done.stderr


def test_a_folder_comes_first(hub: Hub, tmp_path: Path) -> None:
    """A folder of that name is read, as transformers does, unless a revision is asked for."""
    save(tmp_path / "acme/tiny", {**GPT2, "vocab_size": 300})
    name, revision, config, _ = json.loads(fetched(hub, {}).stdout)
    assert (name, revision, config["vocab_size"]) == (str(tmp_path / "acme/tiny"), None, 300)
    assert not hub.asked
    assert json.loads(fetched(hub, {"revision": "main"}).stdout)[2]["vocab_size"] == 8


def test_a_revision_needs_a_model_of_the_hub() -> None:
    """Of a folder, and of random weights, there is none."""
    for model in ({"pretrained": "/models/gpt2"}, {"pretrained": None, "config": {"model_type": "gpt2"}}):
        document = {"model": {**MODEL, **model, "revision": "main"}, "batch": {"sequence_length": 16}}
        with pytest.raises(SpecError, match="`revision` is for models on the hub"):
            parse_spec(document)


def test_a_commit_has_recommendations_of_its_own() -> None:
    """Which warm-start the tunings of another commit."""
    one, other = (
        TuningRequest.model_validate(
            {
                "spec": {"model": {**MODEL, "revision": revision}, "batch": {"sequence_length": 16}},
                "effective_batch_size": 8,
            }
        )
        for revision in ("0" * 40, "1" * 40)
    )
    assert request_fingerprint(one, CPU, {}) == request_fingerprint(other, CPU, {})
    assert fingerprint(one, CPU, None, {}, {}) != fingerprint(other, CPU, None, {}, {})


def test_the_tokenizer_of_a_model_needs_the_model() -> None:
    """A config has no tokenizer."""
    model = {**MODEL, "pretrained": None, "config": {"model_type": "gpt2"}}
    with pytest.raises(SpecError, match=r"`tokenizer: pretrained` needs `model\.pretrained`"):
        parse_spec({"model": model, "batch": {"sequence_length": 16}, "data": TEXT})


def test_a_service_fetches_what_its_operator_lists() -> None:
    """By name or pattern; nothing by default, and a path is no model of the hub."""
    spec = parse_spec({"model": MODEL, "batch": {"sequence_length": 16}})
    assert isinstance(spec.model, TransformersModel)
    assert model_name(spec) == "acme/tiny"
    for allowed in (["acme/tiny"], ["acme/*"]):
        Policy([], [], hub_models=allowed).check_model(spec)
    for refused in ([], ["acme"], ["acme/tin"], ["other/*"]):
        with pytest.raises(HubModelNotAllowedError, match=r"spec\.model\.pretrained.*BATCHWRIGHT_HUB_MODELS"):
            Policy([], [], hub_models=refused).check_model(spec)
    path = parse_spec({"model": {**MODEL, "pretrained": "/acme/tiny"}, "batch": {"sequence_length": 16}})
    with pytest.raises(DataPathNotAllowedError):
        Policy([], [], hub_models=["*"]).check_model(path)
