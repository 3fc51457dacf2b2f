"""Malformed data is refused with the field, the file and the row, whatever its parser does with it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.build import build_data
from batchwright.training.data.sources import completions
from batchwright.workloads.base import Workload
from batchwright.workloads.build import build_workload
from tests.support.factories import gpt_spec, resnet_spec, transformers_spec
from tests.training.data.malformed import Malformed, every_malformed
from tests.training.data.test_data import BERT, GPT2

MALFORMED = every_malformed()
SAMPLE = [one for one in MALFORMED[::12] if one.name.removeprefix("messages-template-") not in {"power", "loops"}]
SAMPLE += [one for one in MALFORMED if one.name == "causal-line-nulls"]

TASKS = {"preference": ("causal-lm", GPT2), "classes": ("sequence-classification", BERT)}
TASKS |= {"words": ("token-classification", BERT)}


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch, own_datasets_cache: None) -> None:
    """Wait less for what never ends."""
    del own_datasets_cache
    monkeypatch.setattr(completions, "_SECONDS", 3.0)
    monkeypatch.setattr(completions, "_SECONDS_OF_ROW", 3.0)


def spec_of(kind: str, data: dict[str, Any] | None = None) -> WorkloadSpec:
    """A small model for a kind of data."""
    fields: dict[str, Any] = {} if data is None else {"data": data}
    if kind == "images":
        return resnet_spec(**fields)
    if kind in TASKS:
        task, config = TASKS[kind]
        if kind == "preference":
            fields["preference"] = {"kind": "dpo"}
        return transformers_spec(task, config, batch={"sequence_length": 64}, **fields)
    return gpt_spec(batch={"sequence_length": 64}, **fields)


@cache
def workload_of(kind: str) -> Workload:
    """The workload of the small model."""
    return build_workload(spec_of(kind))


def check(one: Malformed, folder: Path) -> None:
    """Read all samples: either they can be read, or the error names the field, the file and the row."""
    spec = spec_of(one.kind, one.spec_data(folder))
    try:
        data = build_data(spec, workload_of(one.kind))
        for index in range(len(data)):
            data.batch([index])
    except SpecError as error:
        problem = error.problems[0]
        assert problem.field.startswith("data."), problem
        assert one.place in str(problem), problem
    else:
        assert not one.must_fail, one.name


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one.name)
def test_malformed_data_is_named(tmp_path: Path, one: Malformed) -> None:
    """A few of each kind."""
    check(one, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("one", [one for one in MALFORMED if one not in SAMPLE], ids=lambda one: one.name)
def test_all_malformed_data_is_named(tmp_path: Path, one: Malformed) -> None:
    """All others."""
    check(one, tmp_path)
