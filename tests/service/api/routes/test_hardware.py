"""Requests that name hardware: placed on any worker that has it, queued while none has."""

from typing import Any

from sqlalchemy import select

from batchwright_service.store.database.schema import work_items
from batchwright_service.store.database.transactions import read_transaction
from batchwright_service.store.models import Beat
from tests.service.store.database.test_lanes import H100, card
from tests.support.factories import CPU
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running, StartService

ANY_CPU = {"product": f"{CPU.name[:4]}*"}


def submitted(service: Running, **changes: Any) -> dict[str, Any]:
    """Submit a tuning for hardware, and return it."""
    response = service.http.post("/v1/tunings", json=body(device=None, **changes))
    assert response.status_code == 202, response.text
    return dict(response.json())


def announce_card(service: Running) -> None:
    """Announce a card of another host, whose worker never takes anything."""
    served = card("elsewhere")
    service.system.store.devices.beat(Beat(3600.0, devices=(served,), changed=frozenset({served.slot})))


def test_a_tuning_for_hardware_runs_where_it_is(start_service: StartService) -> None:
    """The answer is the one for the device itself, whose fingerprint is the same: only hardware is in it."""
    service = start_service()
    first = submitted(service, hardware=ANY_CPU)
    assert (first["device"], first["hardware"], first["fingerprint"]) == (None, ANY_CPU["product"], None)
    found = ended(service.http, f"/v1/tunings/{first['id']}")
    assert (found["state"], found["slot"]) == ("SUCCEEDED", found["slot"])
    assert found["recommendation"]["largest_micro_batch_size"] == 37
    assert found["recommendation"]["device"]["id"] == "cpu"
    again = service.http.post("/v1/tunings", json=body(device="cpu"))
    assert again.json()["fingerprint"] == found["fingerprint"] == found["recommendation"]["fingerprint"]
    assert again.json()["state"] == "SUCCEEDED", "served from the store"
    other = service.http.post(
        "/v1/tunings", json=body(device=None, hardware={"product": "*", "min_memory_bytes": "1GiB"})
    )
    assert other.json()["fingerprint"] == found["fingerprint"], "served for other words for the same hardware"
    with read_transaction(service.system.store.engine) as connection:
        (known,) = connection.execute(select(work_items.c.request_fingerprint).distinct()).scalars()
    assert known is not None, "each can be the start of another tuning"


def test_a_job_follows_the_hardware_of_its_tuning(start_service: StartService) -> None:
    """Any worker with the hardware that was measured takes it."""
    service = start_service()
    data = {"kind": "synthetic"}
    spec = body()["spec"] | {"data": data}
    found = ended(service.http, f"/v1/tunings/{submitted(service, spec=spec, hardware=ANY_CPU)['id']}")
    job = {"recommendation_id": found["recommendation_id"], "training": {"updates": 2}}
    response = service.http.post("/v1/jobs", json=job)
    assert (response.status_code, response.json()["device"]) == (202, None)
    assert response.json()["hardware"].startswith(CPU.name)
    assert ended(service.http, f"/v1/jobs/{response.json()['id']}")["state"] == "SUCCEEDED"


def test_a_request_that_no_worker_can_serve_waits_and_says_so(start_service: StartService) -> None:
    """Its place says which hardware no worker has, the service stays ready, and a new worker ends the reason."""
    service = start_service(ready_queue_seconds=0.001)
    needs = {"gpu": "nvidia h100 sxm", "devices_per_node": 1}
    waiting = submitted(service, hardware=needs)
    assert waiting["request"]["hardware"]["gpu"] == "H100-80GB"
    address = f"/v1/tunings/{waiting['id']}"
    place = service.http.get(address).json()["queue"]
    assert place == {"position": 1, "expected_wait_seconds": None, "unserved": "no worker has H100-80GB"}
    assert service.http.get("/readyz").status_code == 200
    announce_card(service)
    (entry,) = service.http.get("/v1/queue").json()["items"]
    assert (entry["device"], entry["hardware"], entry["unserved"]) == (None, "H100-80GB", None)
    assert service.http.post(f"{address}/cancel").json()["state"] == "CANCELLED"


def test_devices_are_grouped_by_hardware(start_service: StartService) -> None:
    """Each kind has its number of devices, and how many are free."""
    service = start_service()
    announce_card(service)
    groups = service.http.get("/v1/devices").json()["hardware"]
    assert [(group["name"], group["gpu"], group["devices"], group["free"]) for group in groups] == [
        (H100, "H100-80GB", 1, 1),
        (CPU.name, None, 1, 1),
    ]


def test_wrong_hardware_names_its_field(shared_service: Running) -> None:
    """A name that the catalogue lacks, a family of several cards, a size, and a device beside hardware."""
    for wanted, words in (
        ({"gpu": "H200-1GB"}, "give `product` or `min_memory_bytes`"),
        ({"gpu": "A100"}, "choose one of"),
        ({"gpu": "48GiB"}, "min_memory_bytes"),
        ({}, "give at least one of `gpu`"),
        ({"gpu": "H100-80GB", "devices_per_node": 0}, "devices_per_node"),
    ):
        refused = shared_service.http.post("/v1/tunings", json=body(device=None, hardware=wanted))
        assert words in str(problem_in(refused, 422, "invalid-request").model_dump())
    both = shared_service.http.post("/v1/tunings", json=body(device="cpu", hardware=ANY_CPU))
    assert "not both" in str(problem_in(both, 422, "invalid-request").model_dump())
