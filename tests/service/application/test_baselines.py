"""The gain over a baseline, from a submission to the lists and the summary."""

from collections.abc import Callable
from typing import Any

import pytest

from batchwright.schemas.requests import Baseline, ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult, UpdateTiming
from tests.support.factories import tuning_request
from tests.support.service.asking import body, ended
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner

BASELINE = {"micro_batch_size": 5}


class TimedRunner(ScriptedRunner):
    """Probes whose micro-batches take a second each, whatever their size."""

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run a scripted probe, and time it."""
        result = super().run(request, should_stop)
        if result.outcome is not Outcome.FIT:
            return result
        sizes = result.micro_batch_sizes
        timing = UpdateTiming(
            updates=5 if request.measures_time else 1,
            micro_batch_sizes=sizes,
            update_seconds=float(len(sizes)),
            micro_batch_seconds=1.0 if len(sizes) > 1 else None,
        )
        return result.model_copy(update={"timing": timing, "measures_time": request.measures_time})


@pytest.fixture
def service(start_service: StartService) -> Running:
    """A service whose probes fit 37 samples and are timed."""
    return start_service(TimedRunner(37))


def submitted(service: Running, **changes: Any) -> dict[str, Any]:
    """A tuning that has ended."""
    return ended(service.http, service.http.post("/v1/tunings", json=body(**changes)).headers["location"])


def test_a_submission_with_a_baseline_is_told_its_gain(service: Running) -> None:
    """The document, both lists and the summary have the speedup with its source; 20 micro-batches become 3."""
    tuning = submitted(service, baseline=BASELINE)
    gain = tuning["recommendation"]["gain"]
    assert gain["baseline"]["gradient_accumulation_steps"] == 20
    assert gain["speedup"] == pytest.approx(20 / 3)
    assert gain["speed_source"] == "estimated"
    assert (tuning["speedup"], tuning["speed_source"]) == (gain["speedup"], "estimated")
    for kind in ("tunings", "recommendations"):
        (row,) = service.http.get(f"/v1/{kind}").json()["items"]
        assert (row["speedup"], row["speed_source"]) == (gain["speedup"], "estimated")
    gains = service.http.get("/v1/summary").json()["gains"]
    assert (gains["recommendations"], gains["speedups"], gains["measured"]) == (1, 1, 0)
    assert gains["speedup"] == gains["models"][0]["speedup"] == gain["speedup"]
    assert gains["models"][0]["memory_gain"] == gains["memory_gain"] > 0


def test_a_submission_without_a_baseline_has_no_gain(service: Running) -> None:
    """Nothing is compared with a plan that nobody named."""
    tuning = submitted(service)
    assert tuning["recommendation"]["gain"] is None
    assert tuning["speedup"] is None
    assert service.http.get("/v1/summary").json()["gains"] == {
        "recommendations": 0,
        "speedup": None,
        "speedups": 0,
        "measured": 0,
        "memory_gain": None,
        "models": [],
    }


def test_a_stored_recommendation_is_compared_with_the_baseline_of_its_caller(service: Running) -> None:
    """No probe runs again: the gain is what the stored evidence shows, and the first tuning keeps its own."""
    first = submitted(service, baseline=BASELINE)
    probes = len(service.runner.sizes)
    answer = service.http.post("/v1/tunings", json=body(baseline={"micro_batch_size": 10, "accumulation_steps": 2}))
    mine = answer.json()
    assert (answer.status_code, len(service.runner.sizes)) == (200, probes)
    assert mine["fingerprint"] == first["fingerprint"]
    gain = mine["recommendation"]["gain"]
    assert (gain["baseline"]["micro_batch_size"], gain["baseline"]["exact"]) == (10, False)
    assert "effective batch is 20, not 100" in gain["statement"]
    kept = service.http.get(f"/v1/tunings/{first['id']}").json()
    assert kept["recommendation"]["gain"] == first["recommendation"]["gain"]


def test_the_sdk_takes_a_baseline(service: Running) -> None:
    """It is part of the request; the recommendation has the gain."""
    with service.client as client:
        found = client.tunings.tune(tuning_request(baseline=Baseline(micro_batch_size=5)))
    assert found.gain is not None
    assert found.gain.baseline_fits
