"""A job or a tuning that needs a package which no worker has is refused when it is submitted."""

from typing import Any

import pytest

from batchwright.client import ApiError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.workloads.required_packages import installed_packages, missing_packages
from batchwright_service.application.rules.device_checks import check_packages
from batchwright_service.errors import UnsupportedJobError
from tests.support.factories import mlp_spec, recommendation, tuning_request
from tests.support.service.running import StartService
from tests.support.service.scripted import SERVED

CLASSIFIED = {"count": 2, "metrics": ["accuracy", "f1"]}


def spec_with(**evaluation: Any) -> WorkloadSpec:
    """A classifier with an evaluation."""
    return mlp_spec(evaluation={**CLASSIFIED, **evaluation})


@pytest.mark.parametrize(
    ("trackers", "workers", "named"),
    [
        ((), [()], r"evaluation\.metrics: `f1` needs the package `torchmetrics`: pip install 'batchwright\[metrics\]'"),
        (("tensorboard", "wandb"), [("torchmetrics", "tensorboard")], r"trackers\.1: `wandb`.*\[wandb\]"),
        (("mlflow",), [(), ("torchmetrics",)], r"trackers\.0: `mlflow`"),
    ],
)
def test_what_no_worker_has_is_named(trackers: tuple[Any, ...], workers: list[tuple[str, ...]], named: str) -> None:
    """With the extra that installs the package: what the worker with the most lacks."""
    devices = [SERVED.model_copy(update={"packages": packages}) for packages in workers]
    with pytest.raises(UnsupportedJobError, match=named):
        check_packages(recommendation(spec_with()), TrainingRequest(trackers=trackers), devices)


@pytest.mark.parametrize("workers", [[], [None], [(), None], [(), ("torchmetrics",)]])
def test_a_job_that_a_worker_may_run_is_taken(workers: list[tuple[str, ...] | None]) -> None:
    """Where one has all, one does not say what it has, or none is known."""
    devices = [SERVED.model_copy(update={"packages": packages}) for packages in workers]
    check_packages(recommendation(spec_with()), TrainingRequest(), devices)


def test_a_package_that_is_too_old_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version that is needed, in place of an error of the package itself."""
    for found, is_there in (("0.49.2", False), ("0.50.0", True), ("1.0", True)):
        monkeypatch.setattr("batchwright.workloads.required_packages.version", lambda _, found=found: found)
        assert ("bitsandbytes" in installed_packages()) == is_there
    (missing,) = missing_packages(mlp_spec(optimizer={"name": "adamw8bit"}), (), ())
    assert missing.message.endswith("pip install 'batchwright[bitsandbytes]' (version 0.50 or newer)")


def test_own_metrics_need_no_package() -> None:
    """Nor does a run without an evaluation."""
    bare = [SERVED.model_copy(update={"packages": ()})]
    check_packages(recommendation(spec_with(metrics=["accuracy"])), TrainingRequest(), bare)
    check_packages(recommendation(mlp_spec()), TrainingRequest(), bare)


def test_a_tuning_is_refused_like_a_job(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what its probes run, the optimizer here; the metrics of an evaluation are none of that."""
    monkeypatch.setattr("batchwright.workloads.required_packages.find_spec", lambda _: None)
    service = start_service()
    with service.client as client:
        with pytest.raises(ApiError) as caught:
            client.tunings.submit(tuning_request(mlp_spec(optimizer={"name": "adamw8bit"})))
        assert caught.value.status == 422
        assert "`adamw8bit` needs the package `bitsandbytes`: pip install" in caught.value.problem.detail
        client.tunings.submit(tuning_request(spec_with()))


def test_a_service_answers_with_the_remedy(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers announce what they have; a dry run, whose place is the caller's, is not asked."""
    monkeypatch.setattr(
        "batchwright.workloads.required_packages.find_spec", lambda name: None if name == "wandb" else True
    )
    found, wanted = recommendation(mlp_spec()), TrainingRequest(trackers=("wandb",))
    service = start_service()
    with service.client as client:
        (device,) = client.devices.list()
        assert set(device.packages or ()) == {"torchmetrics", "bitsandbytes", "tensorboard", "mlflow"}
        with pytest.raises(ApiError) as caught:
            client.jobs.submit(found, wanted)
        assert (caught.value.status, caught.value.code) == (422, "unsupported-job")
        assert "pip install 'batchwright[wandb]'" in caught.value.problem.detail
        assert client.jobs.configure(found, wanted).command
        client.jobs.submit(found, TrainingRequest(updates=1, trackers=("mlflow",)))
