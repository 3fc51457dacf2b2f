"""Configurations of public models: each is accepted as it is published, by more than one release of transformers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.workloads.build import build_model, build_workload, check_workload
from tests.support.factories import transformers_spec

_MODELS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published_configs.yaml").read_text())
del _MODELS["of_version_4"]
PUBLISHED: dict[str, dict[str, Any]] = {name: model["config"] for name, model in _MODELS.items()}
_BATCHES: dict[str, dict[str, int]] = {"image-classification": {}, "ctc": {"sequence_length": 4, "audio_length": 400}}
_EVERY_TEST = """
import transformers
from tests.workloads import test_published_configs as tests

for name in tests.PUBLISHED:
    tests.test_a_published_configuration_is_accepted_and_trains(name)
    tests.test_a_misspelt_field_of_a_published_configuration_is_not(name)
print(transformers.__version__)
"""


def published_spec(name: str, **changes: int) -> WorkloadSpec:
    """The spec of a public model, with changed fields of its config and a small batch of its task."""
    task = _MODELS[name]["task"]
    return transformers_spec(task, {**PUBLISHED[name], **changes}, batch=_BATCHES.get(task, {"sequence_length": 8}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_accepted_and_trains(name: str) -> None:
    """The model that the fields describe has a loss and gradients."""
    spec = published_spec(name)
    workload = build_workload(spec)
    model = build_model(spec, workload)
    ((loss, weight),) = workload.loss_terms(model, workload.make_batch(2)).values()
    torch.autograd.backward(loss)
    assert float(weight) > 0
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_misspelt_field_of_a_published_configuration_is_not(name: str) -> None:
    """One letter less of a size that the model has, and the right name is suggested."""
    sized = next(
        field
        for field in ("hidden_size", "n_embd", "d_model", "dim", "n_layer", "projection_dim")
        if field in PUBLISHED[name]
    )
    with pytest.raises(SpecError, match=rf"model\.config\.{sized[:-1]}: .*did you mean {sized}\?"):
        check_workload(published_spec(name, **{sized[:-1]: 8}))


@pytest.mark.exports
def test_the_oldest_supported_release_of_transformers_does_the_same() -> None:
    """`make test-exports` installs it into a folder (`BATCHWRIGHT_TEST_TRANSFORMERS`) for this process alone."""
    folder = os.environ.get("BATCHWRIGHT_TEST_TRANSFORMERS")
    if folder is None:
        pytest.skip("BATCHWRIGHT_TEST_TRANSFORMERS names no folder")
    environment = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_TEST], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "5.0.0"
