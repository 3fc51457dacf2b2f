"""The update before losses are compared: by the first part, and by the whole batch of what that part does not reach."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from batchwright.training.coupling.check import check_coupling
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.splitting import sliced
from batchwright.workloads.base import LossTerms
from tests.support.coupled import WIDTH, Case, Centred, Terms, squares


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _check(model: nn.Module, terms: Terms, batch: Tensor) -> CouplingReport:
    return check_coupling(model, Case(model, terms), sliced(batch), torch.device("cpu"))


@pytest.mark.parametrize("samples", [3, 6])
def test_a_first_part_without_a_loss_makes_no_update(samples: int) -> None:
    """The whole batch does, so that samples that a weight of zero hides are found to be coupled."""
    middle, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    nn.init.zeros_(middle.weight)

    def coupled_where_positive(_: nn.Module, batch: Tensor) -> LossTerms:
        counts = batch[:, 0] > 0
        outputs = middle(batch)
        return {"loss": ((last(outputs) - 1 + outputs.mean(0))[counts].square().sum(), counts.sum())}

    batch = torch.randn(samples, WIDTH)
    batch[:, 0] = torch.arange(samples) - samples // 3 + 0.5
    assert _check(nn.Sequential(middle, last), coupled_where_positive, batch).coupled


@pytest.mark.parametrize("reaches_another", [True, False])
def test_weights_that_the_first_part_does_not_reach_are_updated_too(*, reaches_another: bool) -> None:
    """The power iterations of a spectral norm, which have converged, lag behind its weights only if these change."""
    normalised: Any = spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=200)
    assert normalised.weight.isfinite().all()
    normalised.parametrizations.weight[0].n_power_iterations = 1
    other = nn.Linear(WIDTH, WIDTH)

    def terms(_: nn.Module, batch: Tensor) -> LossTerms:
        distances = (normalised(batch) - 1).square().sum(1)
        masked = {"masked": (distances[batch[:, 0] > 0].sum(), float(len(batch)))}
        return {**masked, **(squares(other, batch) if reaches_another else {})}

    batch = torch.randn(3, WIDTH)
    batch[:, 0] = torch.tensor([-1.0, 1.0, 1.0])
    report = _check(nn.Sequential(normalised, other), terms, batch)
    assert [culprit.kind for culprit in report.culprits] == ["state"], report.message


def test_a_module_whose_weights_of_zero_cancel_in_one_sample_is_named() -> None:
    """The output of the centred layer, and its gradient, are zero for a sample alone."""

    class CentredFromZero(Centred):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.first.weight)

        def forward(self, features: Tensor) -> Tensor:
            states = self.first(features)
            output: Tensor = features + states - states.mean(0)
            return output

    report = _check(nn.Sequential(nn.Linear(WIDTH, WIDTH), CentredFromZero()), squares, torch.randn(3, WIDTH))
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("module", "1")]


def test_state_is_restored_where_the_update_leads_to_infinite_numbers() -> None:
    """The first loss is compared then, of a model that remembers nothing of the update that was undone."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(()))
            self.scale: Tensor
            self.first = self.layer.weight.detach().double()

        def forward(self, features: Tensor) -> Tensor:
            if not torch.allclose(self.first, self.layer.weight):
                self.scale.fill_(torch.inf)
            outputs: Tensor = self.layer(features) * self.scale.clone()
            return outputs

    report = _check(Remembering(), squares, torch.randn(3, WIDTH))
    assert (report.verdict, report.updates, report.problem) == ("separate", 0, None), report.message
