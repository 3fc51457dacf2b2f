"""The API's document and the examples in it: ``python -m tests.support.service.api_document`` writes both.

The examples are responses of a service around scripted probes and runs. Fixed values replace what differs from run to
run: identifiers, times and paths.
"""

import json
import re
import sys
from typing import Any

import httpx

from batchwright.schemas.results import DeviceInfo
from batchwright.system.temporary_folders import TemporaryFolder
from batchwright_service.api.examples import REQUESTS
from batchwright_service.bootstrap import app_of, build
from batchwright_service.settings import Settings
from tests.support.paths import OPENAPI, ROOT
from tests.support.service.asking import ended
from tests.support.service.registered import commands_file
from tests.support.service.running import running
from tests.support.service.scripted import ScriptedRunner, Trainer

EXAMPLES = ROOT / "service" / "batchwright_service" / "api" / "examples.json"
_DEVICE = DeviceInfo(id="cpu", kind="cpu", name="AMD EPYC 9454", total_bytes=64 * 1024**3)
_CREATED = "2026-01-01T12:00:00Z"
_LATER = {"started_at": "2026-01-01T12:00:02Z", "ended_at": "2026-01-01T12:01:30Z"}
_FIRST_ID = 0x0192F3A1B2C3700089ABCDEF01234567


class _Recorder:
    """Sends requests, and keeps their responses by route and status."""

    def __init__(self, http: httpx.Client) -> None:
        self.responses: dict[str, dict[str, Any]] = {}
        self._http = http

    def ask(self, route: str, body: Any = None, **names: str) -> Any:
        """Return the response to a method and path, with values for the names in the path."""
        method, path = route.split()
        response = self._http.request(method, path.format(**names), json=body).raise_for_status()
        document = response.json()
        self.responses.setdefault(route, {})[str(response.status_code)] = document
        return document

    def tune(self) -> tuple[str, str]:
        """Return the identifiers of a tuning and of its recommendation."""
        submission = REQUESTS["TuningSubmission"]["a small GPT"]["value"]
        tuning = self.ask("POST /v1/tunings", submission)["id"]
        ended(self._http, f"/v1/tunings/{tuning}")
        self.ask("POST /v1/tunings", submission)
        self.ask("GET /v1/tunings")
        return tuning, self.ask("GET /v1/tunings/{tuning_id}", tuning_id=tuning)["recommendation_id"]

    def train(self, recommendation: str) -> str:
        """Return the identifier of a job."""
        dry_run, run = (
            REQUESTS["JobSubmission"][name]["value"] | {"recommendation_id": recommendation}
            for name in ("a dry run", "a run")
        )
        self.ask("POST /v1/jobs", dry_run)
        job = self.ask("POST /v1/jobs", run)["id"]
        ended(self._http, f"/v1/jobs/{job}")
        self.ask("GET /v1/jobs")
        return str(self.ask("GET /v1/jobs/{job_id}", job_id=job)["id"])

    def read(self, recommendation: str) -> None:
        """Read a recommendation, and what belongs to no tuning and no job."""
        one = "/v1/recommendations/{recommendation_id}"
        self.ask("GET /v1/recommendations")
        self.ask(f"GET {one}", recommendation_id=recommendation)
        self.ask(f"POST {one}/confirm", recommendation_id=recommendation)
        self.ask("GET /v1/exports")
        self.ask(f"GET {one}/exports/{{format}}", recommendation_id=recommendation, format="hugging-face")
        self.ask("GET /v1/commands")


def examples() -> str:
    """Return the examples of responses as JSON: by method and path, then by status."""
    with TemporaryFolder() as folder:
        commands = commands_file(folder / "commands")
        with running(folder, ScriptedRunner(37), Trainer(), _DEVICE, commands=commands) as service:
            recorder = _Recorder(service.http)
            tuning, recommendation = recorder.tune()
            recorder.read(recommendation)
            job = recorder.train(recommendation)
            recorder.ask("POST /v1/jobs/bulk", {"action": "delete", "ids": [job, "job_" + "0" * 32]})
            recorder.ask("POST /v1/tunings/bulk", {"action": "delete", "ids": [tuning, "tun_" + "0" * 32]})
    text = json.dumps(recorder.responses).replace(str(folder), "/var/lib/batchwright")
    fixed = json.loads(_fixed(text.replace(sys.executable, "python")), object_hook=_in_order)
    lines = (f"{json.dumps(route)}: {json.dumps(responses)}" for route, responses in fixed.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fixed(text: str) -> str:
    """Replace identifiers, times and durations."""
    for number, identifier in enumerate(dict.fromkeys(re.findall(r"(?:tun|job|rec)_[0-9a-f]{32}", text))):
        text = text.replace(identifier, f"{identifier[:4]}{_FIRST_ID + number:032x}")
    text = re.sub(r'(total_seconds\\*": )[\d.]+', r"\g<1>88.0", text)
    text = re.sub(r'((?:start|data|coupling_check|estimate|what_if)_seconds\\*": )[\d.e-]+', r"\g<1>1.5", text)
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", _CREATED, text)


def _in_order(document: dict[str, Any]) -> dict[str, Any]:
    """Let work start after it was created, and end after that."""
    for name, time in _LATER.items():
        if document.get(name):
            document[name] = document["updated_at"] = time
    return document


def document() -> str:
    """Return the OpenAPI document of a service with default settings, as JSON that ends with a newline."""
    with TemporaryFolder() as folder:
        settings = Settings(data_dir=folder, database_url=None)
        system = build(settings, devices=())
        try:
            return json.dumps(app_of(system, settings).openapi(), indent=2, ensure_ascii=False) + "\n"
        finally:
            system.stop()


if __name__ == "__main__":
    EXAMPLES.write_text(examples(), encoding="utf-8")
    OPENAPI.write_text(document(), encoding="utf-8")
