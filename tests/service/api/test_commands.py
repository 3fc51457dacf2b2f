"""Tests of registered commands through the API, around a scripted device."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.client import Client
from batchwright.client.documents.api_keys import Scope
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import ConfigurationError
from batchwright_service.store.models import Beat
from tests.service.store.database.test_lanes import card
from tests.support.service.asking import PATIENCE_SECONDS, body, ended, problem_in
from tests.support.service.registered import DEFINITION, commands_file, named, recommended, submission
from tests.support.service.running import Running, StartService


@pytest.fixture
def service(start_service: StartService, tmp_path: Path) -> Running:
    """A service with one registered command."""
    return start_service(commands=commands_file(tmp_path / "operator"))


def tuned(service: Running, **arguments: Any) -> dict[str, Any]:
    """A tuning of the command that has ended."""
    response = service.http.post("/v1/tunings", json=submission(**arguments))
    assert response.status_code in {200, 202}, response.text
    return ended(service.http, response.headers["location"])


def test_an_inexact_division_of_a_registered_command_is_refused(start_service: StartService, tmp_path: Path) -> None:
    """At the submission, with the nearest effective batches."""
    argv = [*DEFINITION["argv"], "--groups={micro_batch_size/7}"]
    service = start_service(commands=commands_file(tmp_path / "operator", argv=argv))
    refused = problem_in(service.http.post("/v1/tunings", json=submission(width=12)), 422, "invalid-request")
    assert "multiples of 7, none of which divides an effective batch of 60 (nearest: 56 and 63)" in refused.detail


def test_the_commands_are_listed_with_the_schema_of_their_arguments(service: Running) -> None:
    """A tag spares a caller the list that it has."""
    response = service.http.get("/v1/commands")
    (command,) = response.json()["items"]
    assert (command["name"], command["title"], command["world_size"]) == ("wide", "Wide model", 1)
    assert command["arguments"]["properties"]["width"]["maximum"] == 64
    known = service.http.get("/v1/commands", headers={"If-None-Match": response.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_a_service_without_a_file_lists_none(start_service: StartService) -> None:
    """And refuses every name with the remedy."""
    service = start_service()
    assert service.http.get("/v1/commands").json() == {"items": []}
    refused = problem_in(service.http.post("/v1/tunings", json=submission(width=12)), 422, "invalid-request")
    assert "registered: none; the operator adds others to the file BATCHWRIGHT_COMMANDS" in refused.detail


def test_a_list_needs_the_scope_of_reads(service: Running) -> None:
    """As other reads of tunings."""
    key, secret = make_key("jobs", (Scope.JOBS_READ,))
    service.system.store.keys.add(key)
    assert service.http.get("/v1/commands").status_code == 401
    headers = {"Authorization": f"Bearer {secret}"}
    problem_in(service.http.get("/v1/commands", headers=headers), 403, "scope-missing")


def test_a_tuning_keeps_the_name_and_the_registered_parts(service: Running) -> None:
    """Under the registered name in lists, and without a precision."""
    found = tuned(service, width=12)
    assert found["state"] == "SUCCEEDED"
    model = found["request"]["spec"]["model"]
    assert model["name"] == found["model"] == "wide"
    assert model["arguments"] == {"width": 12, "rate": 0.1, "note": "none", "packing": False}
    assert model["argv"][1:3] == ["program.py", "--size={micro_batch_size}"]
    assert len(model["definition"]) == 64
    assert found["recommendation"]["plan"]["micro_batch_size"] == 30
    for query in ({}, {"model": "wide"}, {"device": "cpu"}, {"model": "wide", "objective": "largest"}):
        (listed,) = service.http.get("/v1/recommendations", params=query).json()["items"]
        assert (listed["model"], listed["precision"]) == ("wide", None)
    assert service.http.get("/v1/recommendations", params={"precision": "fp32"}).json()["items"] == []


def test_a_recommendation_is_used_again_until_the_command_changes(service: Running, tmp_path: Path) -> None:
    """The script is part of the fingerprint, as the registration; equal arguments are equal requests."""
    made = tuned(service, width=12)
    assert tuned(service, width=12, rate=0.1)["id"] == made["id"]
    assert tuned(service, width=13)["fingerprint"] != made["fingerprint"]
    (tmp_path / "operator" / "program.py").write_text("pass")
    assert tuned(service, width=12)["fingerprint"] != made["fingerprint"]


def test_a_stored_request_can_be_submitted_again(service: Running) -> None:
    """As the pages and the SDK do, with all its parts."""
    made = tuned(service, width=12)
    again = service.http.post("/v1/tunings", json={**made["request"], "fresh": True})
    assert again.status_code == 202
    made["request"]["spec"]["model"]["argv"].append("--evil")
    refused = service.http.post("/v1/tunings", json=made["request"])
    assert "leave out `argv`" in problem_in(refused, 403, "command-not-allowed").detail


def test_the_command_of_a_caller_is_refused(service: Running) -> None:
    """With the two remedies."""
    spec = {"model": {"kind": "command", "argv": ["sh", "-c", "id {micro_batch_size}"]}}
    refused = service.http.post("/v1/tunings", json={"spec": spec, "effective_batch_size": 8})
    detail = problem_in(refused, 403, "command-not-allowed").detail
    assert "GET /v1/commands" in detail
    assert "batchwright tune ... -- COMMAND" in detail


def test_wrong_arguments_are_named_by_their_path(service: Running) -> None:
    """With the bounds, and the nearest name."""
    spec = named(widht=12, rate=7)
    refused = service.http.post("/v1/tunings", json={"spec": spec, "effective_batch_size": 8})
    found = {fault.field: fault.message for fault in problem_in(refused, 422, "invalid-request").errors}
    assert found == {
        "spec.model.arguments.widht": "is not an argument of `wide`; did you mean `width`?",
        "spec.model.arguments.width": "is required",
        "spec.model.arguments.rate": "must be at most 1.0 (allowed: from 1e-06 to 1.0)",
    }
    spec["model"]["name"] = "wid"
    refused = service.http.post("/v1/tunings", json={"spec": spec, "effective_batch_size": 8})
    (fault,) = problem_in(refused, 422, "invalid-request").errors
    assert (fault.field, fault.message) == (
        "spec.model.name",
        "is not a registered command; did you mean `wide`?",
    )


def test_a_job_runs_the_registered_command(service: Running) -> None:
    """Of a stored recommendation, or of a sent one that only names the command."""
    found = tuned(service, width=12)["recommendation"]
    for given in ({"recommendation_id": found["id"]}, {"recommendation": recommended(width=12)}):
        response = service.http.post("/v1/jobs", json=given)
        job = ended(service.http, response.headers["location"])
        assert (job["state"], job["model"]) == ("SUCCEEDED", "wide")
        assert job["recommendation"]["request"]["spec"] == found["request"]["spec"]


def announce_cards(service: Running, *indices: int) -> DeviceInfo:
    """Announce cards of another host, whose worker never takes anything; return the first."""
    served = [card("elsewhere", index) for index in indices]
    service.system.store.devices.beat(
        Beat(3600.0, devices=tuple(served), changed=frozenset(each.slot for each in served))
    )
    return served[0].device


def test_a_command_of_two_ranks_takes_hardware_of_two_devices(start_service: StartService, tmp_path: Path) -> None:
    """One device would hold a card, and leave the other ranks those of others."""
    service = start_service(commands=commands_file(tmp_path / "operator", world_size=2))
    announce_cards(service, 0, 1)
    asked = {**submission(width=12), "hardware": {"gpu": "H100-80GB"}}
    refused = service.http.post("/v1/tunings", json=asked)
    assert "give `devices_per_node: 2` in `hardware`" in problem_in(refused, 422, "invalid-request").detail
    asked["hardware"]["devices_per_node"] = 2
    taken = service.http.post("/v1/tunings", json=asked)
    assert taken.status_code == 202, taken.text
    assert taken.json()["hardware"].startswith("2 x H100-80GB")


@pytest.mark.parametrize(("cards", "hardware"), [((0,), None), ((0, 1), "2 x NVIDIA H100 80GB HBM3")])
def test_the_job_of_a_command_of_two_ranks_holds_two_cards(
    cards: tuple[int, ...], hardware: str | None, start_service: StartService, tmp_path: Path
) -> None:
    """A host that serves one card alone leaves its others to the command."""
    service = start_service(commands=commands_file(tmp_path / "operator", world_size=2))
    device = announce_cards(service, *cards)
    taken = service.http.post("/v1/jobs", json={"recommendation": recommended(device, world_size=2, width=12)})
    assert taken.status_code == 202, taken.text
    if hardware is None:
        assert taken.json()["device"] == "cuda:0"
    else:
        assert (taken.json()["device"], taken.json()["hardware"].startswith(hardware)) == (None, True)


def test_a_dry_run_is_the_command_line_for_the_recommendation(service: Running) -> None:
    """Which watches the command as a worker does."""
    given = {"recommendation": recommended(width=12), "dry_run": True}
    configured = service.http.post("/v1/jobs", json=given).json()
    assert configured["command"] == [
        *("python", "-m", "batchwright", "train", "recommendation.json", "--output-dir", ".")
    ]
    (file,) = configured["files"]
    assert file["path"] == "recommendation.json"
    assert "--width={argument:width}" in json.loads(file["content"])["request"]["spec"]["model"]["argv"]


def test_a_job_runs_no_command_of_a_caller(service: Running) -> None:
    """Nor a registered one with other words, variables or settings."""
    found, changes = recommended(width=12), dict[str, Any]()
    model, names = found["request"]["spec"]["model"], []
    for changes in ({"name": None, "argv": ["sh", "-c", "{micro_batch_size}"]}, {"argv": ["sh", "{micro_batch_size}"]}):
        found["request"]["spec"]["model"] = model | changes
        problem_in(service.http.post("/v1/jobs", json={"recommendation": found}), 403, "command-not-allowed")
    for changes in ({"environment": {"LD_PRELOAD": "x.so"}}, {"arguments": {"width": 65}}):
        found["request"]["spec"]["model"] = model | changes
        refused = service.http.post("/v1/jobs", json={"recommendation": found})
        names += [fault.field for fault in problem_in(refused, 422, "invalid-request").errors]
    given = {"recommendation": recommended(width=12), "training": {"updates": 7, "seed": 1, "workers": 0}}
    refused = service.http.post("/v1/jobs", json=given)
    names += [fault.field for fault in problem_in(refused, 422, "invalid-request").errors]
    assert names == ["spec.model.environment", "spec.model.arguments.width", "training.updates", "training.seed"]


def test_a_job_of_a_command_is_resumed_without_a_checkpoint(service: Running) -> None:
    """The program knows of its own."""
    service.trainer.hold_at = 1
    job = service.http.post("/v1/jobs", json={"recommendation": recommended(width=12)}).json()
    assert service.trainer.holding.wait(PATIENCE_SECONDS)
    service.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert ended(service.http, f"/v1/jobs/{job['id']}")["state"] == "CANCELLED"
    service.trainer.hold_at = None
    assert service.http.post(f"/v1/jobs/{job['id']}/resume").status_code == 202
    assert ended(service.http, f"/v1/jobs/{job['id']}")["state"] == "SUCCEEDED"


def test_the_time_limit_of_a_probe_is_that_of_the_operator(start_service: StartService, tmp_path: Path) -> None:
    """Callers may ask for less."""
    service = start_service(commands=commands_file(tmp_path / "operator", probe_timeout_seconds=60))
    assert tuned(service, width=12)["request"]["probe_timeout_seconds"] == 60
    refused = service.http.post("/v1/tunings", json={**submission(width=12), "probe_timeout_seconds": 61})
    (fault,) = problem_in(refused, 422, "invalid-request").errors
    assert (fault.field, fault.message) == ("probe_timeout_seconds", "must be at most 60, the limit of `wide`")


def test_a_wrong_file_stops_the_start(start_service: StartService, tmp_path: Path) -> None:
    """With the file, the command and the field."""
    path = commands_file(tmp_path / "operator", world_size=0)
    with pytest.raises(
        ConfigurationError, match=r"BATCHWRIGHT_COMMANDS: .*commands\.yaml:\n.*commands\.wide\.world_size"
    ):
        start_service(commands=path)


def test_readiness_says_that_the_file_has_changed(service: Running, tmp_path: Path) -> None:
    """The service stays ready: a restart reads the file."""
    assert service.http.get("/readyz").json()["checks"]["commands"] == "1 registered"
    with (tmp_path / "operator" / "commands.yaml").open("a") as file:
        file.write("# more\n")
    commands = service.system.context.commands
    assert commands.state() == "1 registered; changed since the start: restart to read it"


def test_the_sdk_lists_and_tunes_commands(service: Running) -> None:
    """By the documents of the API."""
    with Client(service.url) as client:
        (command,) = client.commands.list()
        request = TuningRequest.model_validate({"spec": named(width=12), "effective_batch_size": 60})
        found = client.tunings.tune(request)
        again = client.tunings.submit(found.request, fresh=True)
    assert command.name == "wide"
    assert found.request.command is not None
    assert found.request.command.model.name == "wide"
    assert again.request == found.request


def test_workloads_are_tuned_beside_commands(service: Running) -> None:
    """As before."""
    response = service.http.post("/v1/tunings", json=body())
    assert ended(service.http, response.headers["location"])["state"] == "SUCCEEDED"


def test_an_export_carries_the_values_of_the_caller(start_service: StartService, tmp_path: Path) -> None:
    """Quoted for the shell of the launcher, and as a word of the command."""
    argv = ["python", "program.py", "--size={micro_batch_size}", "--text={argument:text}", "{file:a.yaml}"]
    arguments = {"text": {"type": "string", "default": "x"}}
    path = commands_file(
        tmp_path / "operator", argv=argv, arguments=arguments, files={"a.yaml": "text: {argument:text}\n"}
    )
    service = start_service(commands=path)
    text = "a'; touch pwned; {updates} $(id)"
    found = tuned(service, text=text)["recommendation"]
    exported = service.http.get(f"/v1/recommendations/{found['id']}/exports/slurm").json()
    script = next(file["content"] for file in exported["files"] if "srun" in file["content"])
    assert shlex.quote(f"--text={text}") in script
    assert {"text": text} in [
        yaml.safe_load(file["content"]) for file in exported["files"] if "srun" not in file["content"]
    ]
