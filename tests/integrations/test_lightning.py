"""The callbacks of Lightning's Trainer, in fits of the Trainer itself."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.errors import SpecError, TuningFailedError
from batchwright.schemas.recommendation import Evidence, Headroom, Proof, Recommendation
from batchwright.workloads.build import summarize
from tests.support.factories import CPU, probe_result, python_spec, recommendation

pytestmark = [pytest.mark.exports, pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def integration() -> Any:
    """The module under test, imported only where the library is installed."""
    return importlib.import_module("batchwright.integrations.lightning")


@pytest.fixture
def user() -> Any:
    """A user's module and data, likewise."""
    return importlib.import_module("tests.support.exports.lightning_module")


def found(
    user: Any, effective_batch_size: int = 16, limit_bytes: int = 4 * 1024**3, world_size: int = 1
) -> Recommendation:
    """The recommendation of the module on the CPU, with micro-batches of at most 8."""
    probe = probe_result(8, model=summarize(user.Module()))
    return recommendation(
        python_spec("my_project.workloads:build"),
        effective_batch_size,
        8,
        world_size=world_size,
        device=CPU,
        evidence=Evidence(probes=(probe,), proof=Proof(fits=8, stopped_by="bound", statement="for a test")),
        headroom=Headroom(limit_bytes=limit_bytes, peak_bytes=0, free_bytes=0, free_fraction=0.0),
    )


def fields(refused: SpecError) -> dict[str, str]:
    """The fields at fault, with the values that the fit had."""
    return {problem.field: problem.value for problem in refused.problems}


# --- BatchPlanCallback ---


def test_a_fit_that_follows_the_plan_trains_and_logs_its_peaks(integration: Any, user: Any) -> None:
    """Two micro-batches of eight, and the figures among the Trainer's metrics."""
    module = user.Module()
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user)), accumulate_grad_batches=2)

    made.fit(module, datamodule=user.Data(8, 64))

    logged = made.logged_metrics
    assert module.updates() == [[8, 8]] * 4
    assert 0 < logged["memory/peak_resident_bytes"] < logged["memory/limit_bytes"] == 4 * 1024**3
    assert logged["memory/peak_fraction"] == pytest.approx(float(logged["memory/peak_resident_bytes"]) / 4 / 1024**3)


def test_every_setting_that_contradicts_is_named(integration: Any, user: Any) -> None:
    """Before the first batch, with the value of the fit and what the plan has."""
    module = user.Module()
    made = user.quiet_trainer(
        integration.BatchPlanCallback(found(user)), accumulate_grad_batches=3, precision="bf16-mixed"
    )

    with pytest.raises(SpecError) as refused:
        made.fit(module, datamodule=user.Data(4, 64))

    assert fields(refused.value) == {"accumulate_grad_batches": "3", "batch_size": "4", "precision": "bf16-mixed"}
    assert "accumulate_grad_batches: must be 2 (got 3)" in str(refused.value)
    assert module.updates() == []


def test_a_short_last_micro_batch_is_refused(integration: Any, user: Any) -> None:
    """Unless the loader drops it."""
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user)), accumulate_grad_batches=2)

    with pytest.raises(SpecError, match="drop_last: must be True: 60 samples are no multiple of 8"):
        made.fit(user.Module(), datamodule=user.Data(8, 60, drop_last=False))


def test_another_model_is_refused(integration: Any, user: Any) -> None:
    """By its number of parameters."""
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user)), accumulate_grad_batches=2)

    with pytest.raises(SpecError, match="parameters, as the model that was probed"):
        made.fit(user.Module(nn.Linear(32, 32)), datamodule=user.Data(8, 64))


def test_the_ranks_of_the_plan_have_to_be_started(integration: Any, user: Any) -> None:
    """One process is refused a plan for two."""
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user, 32, world_size=2)), accumulate_grad_batches=2)

    with pytest.raises(SpecError) as refused:
        made.fit(user.Module(), datamodule=user.Data(8, 64))

    assert fields(refused.value) == {"devices": "1"}


def test_accumulation_that_changes_between_epochs_is_refused(integration: Any, user: Any) -> None:
    """It changes the effective batch."""
    changing = importlib.import_module("lightning.pytorch.callbacks").GradientAccumulationScheduler({0: 2, 4: 4})
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user)), changing)

    with pytest.raises(SpecError, match="must not have a GradientAccumulationScheduler"):
        made.fit(user.Module(), datamodule=user.Data(8, 64))


def test_a_short_last_window_is_warned_of(integration: Any, user: Any) -> None:
    """With the setting that leaves it out."""
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user)), accumulate_grad_batches=2)

    with pytest.warns(UserWarning, match=r"the last update of each epoch has 1 of 2 micro-batches") as warned:
        made.fit(user.Module(), datamodule=user.Data(8, 72))

    assert any("Set `limit_train_batches=8`" in str(warning.message) for warning in warned)


def test_a_peak_above_the_limit_is_warned_of_once(integration: Any, user: Any) -> None:
    """Not at every batch."""
    made = user.quiet_trainer(integration.BatchPlanCallback(found(user, limit_bytes=1000)), accumulate_grad_batches=2)

    with pytest.warns(UserWarning, match=r"is above the limit of 1000 B") as warned:
        made.fit(user.Module(), datamodule=user.Data(8, 64))

    assert sum("above the limit" in str(warning.message) for warning in warned) == 1


# --- ExactBatchSize ---


def test_the_largest_micro_batch_of_a_module_is_found_by_probes(integration: Any, user: Any) -> None:
    """Its own training step and optimizer run in other processes. The fit's updates and schedule follow the size."""
    module, data = user.Module(), user.Data()
    weights, started = [parameter.detach().clone() for parameter in module.parameters()], user.StartingWeights()
    finder = integration.ExactBatchSize(512, "24MiB", progress=False)
    made = user.quiet_trainer(finder, started, max_epochs=2)

    made.fit(module, datamodule=data)

    assert "search-without-estimate" not in {advice.code for advice in finder.recommendation.warnings}
    proof = finder.recommendation.evidence.proof
    assert (proof.stopped_by, proof.next_size) == ("oom", proof.fits + 1)
    assert data.batch_size == finder.plan.micro_batch_size <= proof.fits < 512
    assert module.updates() == [[data.batch_size] * finder.plan.gradient_accumulation_steps] * 2
    assert sum(module.updates()[0]) == 512
    assert module.schedule_updates[-1] == 2  # of a micro-batch of 2 without accumulation they would be 512
    assert all(torch.equal(*pair) for pair in zip(weights, started.weights, strict=True))
    assert made.logged_metrics["memory/limit_bytes"] == 24 * 1024**2


def test_a_prime_batch_is_exact_and_the_many_steps_are_warned_of(integration: Any, user: Any) -> None:
    """With batches nearby that Lightning reaches in fewer."""
    module = user.Module()
    finder = integration.ExactBatchSize(101, progress=False, max_micro_batch_size=50)

    with pytest.warns(
        UserWarning, match=r"101 accumulation steps instead of 3: 1 is the largest.*nearby.*100 \(2 x 50\)"
    ):
        user.quiet_trainer(finder).fit(module, datamodule=user.Data(samples=202))

    assert [sum(update) for update in module.updates()] == [101, 101]


def test_a_loss_that_couples_samples_ends_the_fit(integration: Any, user: Any) -> None:
    """BatchNorm: no accumulation is exact for it."""
    module = user.Module(nn.BatchNorm1d(32))
    finder = integration.ExactBatchSize(64, progress=False, max_micro_batch_size=8)

    with pytest.raises(TuningFailedError, match="BatchNorm"):
        user.quiet_trainer(finder).fit(module, datamodule=user.Data())

    assert module.updates() == []


def test_a_training_step_that_raises_ends_the_fit_with_its_traceback(integration: Any, user: Any) -> None:
    """From the process of the probe."""
    finder = integration.ExactBatchSize(64, progress=False)

    with pytest.raises(TuningFailedError, match="ZeroDivisionError"):
        user.quiet_trainer(finder).fit(user.Broken(), datamodule=user.Data())


def test_a_fit_without_a_batch_size_to_set_is_refused(integration: Any, user: Any) -> None:
    """Every reason is named before any probe."""
    data = user.Data()
    del data.batch_size
    finder = integration.ExactBatchSize(64, progress=False)
    made = user.quiet_trainer(finder, accumulate_grad_batches=4, precision="64-true")

    with pytest.raises(SpecError) as refused:
        made.fit(user.Module(), datamodule=data)

    assert fields(refused.value) == {"accumulate_grad_batches": "4", "precision": "64-true", "batch_size": ""}


def test_a_loader_that_is_passed_to_fit_is_refused(integration: Any, user: Any) -> None:
    """Its batch size cannot be set."""
    finder = integration.ExactBatchSize(64, progress=False)
    module = user.Module()
    module.batch_size = 2

    with pytest.raises(SpecError, match="train_dataloaders: must come from"):
        user.quiet_trainer(finder).fit(module, user.Data().train_dataloader())


def test_a_loader_that_ignores_the_attribute_is_refused(integration: Any, user: Any) -> None:
    """Before the first batch: the fit would have another effective batch."""
    module = user.Module()
    finder = integration.ExactBatchSize(32, progress=False, max_micro_batch_size=16)

    with pytest.raises(SpecError, match="must pass `batch_size` on to the DataLoader"):
        user.quiet_trainer(finder).fit(module, datamodule=user.IgnoringData())

    assert module.updates() == []
