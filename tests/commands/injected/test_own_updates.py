"""Tests of what a program without an optimizer of torch shows: its updates, and blocks that are no evaluation."""

import gc
import importlib
import sys
from pathlib import Path

import pytest
import torch

from batchwright.commands.injected.evaluations import Evaluations
from batchwright.commands.injected.own_updates import OwnUpdates

pytestmark = pytest.mark.torch


def test_parameters_with_other_values_are_an_update() -> None:
    """Each change counts once; a further backward pass alone is none, with gradients added or set to zero."""
    weight, bias = torch.ones(3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    seen: list[OwnUpdates] = []
    updates = OwnUpdates(torch, seen.append)

    counts = []
    for change in (0.0, 0.0, 0.1, 0.1, 0.0):
        updates.look()
        counts.append(len(seen))
        loss = (torch.ones(4, 3) @ weight + bias).sum()
        torch.autograd.backward(loss)
        updates.keep(loss)
        bias.data -= change
        bias.grad = None

    updates.look()
    assert [*counts, len(seen)] == [0, 0, 0, 1, 2, 2]


def test_a_block_that_called_no_model_is_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that turns gradients off and was not entered is named."""
    for mode in (torch.no_grad, torch.inference_mode):
        monkeypatch.setattr(mode, "__enter__", mode.__enter__)
    (tmp_path / "updates_by_hand.py").write_text(
        "import torch\n"
        "@torch.no_grad()\n"
        "def average(): return torch.ones(1)\n"
        "def evaluate():\n"
        "    with torch.inference_mode(): return torch.ones(1)\n"
        "average()\n"
        "with torch.no_grad(): torch.ones(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    evaluations = Evaluations()
    evaluations.watch(torch)
    program = importlib.import_module("updates_by_hand")
    monkeypatch.setitem(sys.modules, program.__name__, program)

    loaders = [each for each in gc.get_objects() if isinstance(each, torch.utils.data.DataLoader)]
    data_sets = {id(each.dataset) for each in loaders}  # of other tests

    assert evaluations.later(data_sets) == "updates_by_hand.py:5"
    program.evaluate()
    assert evaluations.later(data_sets) is None
