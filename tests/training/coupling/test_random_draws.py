"""Losses that draw noise: each sample gets equal numbers in the batch and in its parts, so that they compare."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils.checkpoint import checkpoint

from batchwright.training.coupling.check import check_coupling
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.splitting import sliced
from batchwright.workloads.base import LossTerms
from tests.support.coupled import WIDTH, Case, Noisy, Terms, squares

CPU = torch.device("cpu")


def network(*middle: nn.Module) -> nn.Sequential:
    """Two layers with a module between them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))


def report_on(terms: Terms, model: nn.Module | None = None) -> CouplingReport:
    """The check on eight samples."""
    torch.manual_seed(0)
    model = network(nn.ReLU()) if model is None else model
    return check_coupling(model, Case(model, terms), sliced(torch.randn(8, WIDTH)), CPU)


def diffusion(model: nn.Module, batch: Tensor) -> LossTerms:
    """Ho et al. (2020): a noise level and noise for each sample, which the model tells from one another."""
    levels, noise = torch.rand(len(batch), 1), torch.randn_like(batch)
    noisy = batch * (1 - levels) + noise * levels
    return {"noise": ((model(noisy) - noise).square().sum(), float(batch.numel()))}


def discrete_diffusion(model: nn.Module, batch: Tensor) -> LossTerms:
    """Diffusion with integer steps instead of levels, and a mask."""
    steps, hidden = torch.randint(0, 1000, (len(batch),)), torch.bernoulli(torch.full_like(batch, 0.3))
    outputs = model(batch * (1 - hidden)) * (steps[:, None] / 1000)
    return {"hidden": (((outputs - batch) * hidden).square().sum(), float(len(batch)))}


def flow_matching(model: nn.Module, batch: Tensor) -> LossTerms:
    """Lipman et al. (2023), with the times of a logistic normal distribution."""
    times, start = torch.sigmoid(torch.normal(0.0, 1.0, (len(batch), 1))), torch.empty_like(batch).normal_()
    velocity = model(start + times * (batch - start))
    return {"flow": ((velocity - (batch - start)).square().sum(), float(len(batch)))}


def variational(model: nn.Module, batch: Tensor) -> LossTerms:
    """Kingma and Welling (2014): the noise scales with an output of the model."""
    mean, spread = model(batch).chunk(2, dim=1)
    latent = torch.distributions.Normal(mean, spread.exp()).rsample()
    divergence = 0.5 * (mean.square() + (2 * spread).exp() - 1 - 2 * spread).sum()
    return {
        "error": ((latent.sum(1) - batch.sum(1)).square().sum(), float(len(batch))),
        "divergence": (divergence, float(len(batch))),
    }


def several_draws_a_sample(model: nn.Module, batch: Tensor) -> LossTerms:
    """Three noises for each sample, in rows one after the other."""
    repeated = batch.repeat_interleave(3, 0)
    return {"noise": (model(repeated + torch.randn_like(repeated)).square().sum(), float(len(batch)))}


def draws_by_turns(model: nn.Module, batch: Tensor) -> LossTerms:
    """Three noises for each sample, all first ones before all second ones."""
    repeated = batch.repeat(3, 1)
    return {"noise": (model(repeated + torch.randn_like(repeated)).square().sum(), float(len(batch)))}


def samples_in_the_second_dimension(model: nn.Module, batch: Tensor) -> LossTerms:
    """A loss with noise of shape (steps, samples, features)."""
    steps = batch.expand(5, *batch.shape)
    return {"noise": (model(steps + torch.randn_like(steps)).square().sum(), float(len(batch)))}


def one_draw_for_all(model: nn.Module, batch: Tensor) -> LossTerms:
    """A noise level that all samples share."""
    return {"noise": (model(batch * torch.rand(1)).square().sum(), float(len(batch)))}


def gumbel(model: nn.Module, batch: Tensor) -> LossTerms:
    """A loss with sampled classes, and dropout outside of modules."""
    chosen = F.gumbel_softmax(model(F.dropout(batch, 0.2)), hard=True)
    return {"chosen": ((chosen * batch).sum(), float(len(batch)))}


SEPARATE = (
    diffusion,
    discrete_diffusion,
    flow_matching,
    variational,
    several_draws_a_sample,
    draws_by_turns,
    samples_in_the_second_dimension,
    one_draw_for_all,
    gumbel,
)


@pytest.mark.parametrize("terms", SEPARATE)
def test_a_loss_that_draws_noise_is_a_sum_over_samples(terms: Terms) -> None:
    """Each of these losses is compared in training mode, and passes."""
    report = report_on(terms, nn.Sequential(network(nn.ReLU(), nn.Dropout(0.1))))
    assert report.verdict == "separate", report.message
    assert report.train_mode
    assert max(report.loss_error, report.gradient_error) < 1e-10


def normalized_weights(model: nn.Module, batch: Tensor) -> LossTerms:
    """Weights by noise level that are divided by their mean over the batch."""
    levels = torch.rand(len(batch))
    errors = (model(batch + levels[:, None] * torch.randn_like(batch)) - batch).square().sum(1)
    return {"noise": ((errors * levels / levels.mean()).sum(), float(len(batch)))}


def chosen_among_samples(model: nn.Module, batch: Tensor) -> LossTerms:
    """Each sample is mixed with another, picked by its weight."""
    partners = torch.multinomial(torch.ones(len(batch)), len(batch), replacement=True)
    return {"mixed": (model(batch + 0.3 * batch[partners]).square().sum(), float(len(batch)))}


def shuffled(model: nn.Module, batch: Tensor) -> LossTerms:
    """Mixup (Zhang et al., 2018): each sample is mixed with another one."""
    return {"mixed": (model(batch + 0.3 * batch[torch.randperm(len(batch))]).square().sum(), float(len(batch)))}


def negatives(model: nn.Module, batch: Tensor) -> LossTerms:
    """Each sample's negative is another one, drawn by its number."""
    others = batch[torch.randint(0, len(batch), (len(batch),))]
    return {"negative": ((model(batch) * others).sum(), float(len(batch)))}


@pytest.mark.parametrize("terms", [shuffled, chosen_among_samples, negatives])
def test_a_loss_that_mixes_samples_at_random_is_not_judged(terms: Terms) -> None:
    """If a part's draw matches no draw of the batch, the operation is named, and there is no verdict."""
    report = report_on(terms)
    assert report.verdict == "not-compared"
    assert "torch." in report.message
    assert "random numbers" in report.message


def test_coupling_behind_noise_is_found() -> None:
    """A statistic of the noise over the batch, and BatchNorm in a model whose loss draws."""
    report = report_on(normalized_weights)
    assert report.verdict == "coupled"
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "noise")]
    report = report_on(diffusion, network(nn.BatchNorm1d(WIDTH)))
    assert report.train_mode
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("module", "1")]


def test_a_draw_that_depends_on_its_input_hides_no_coupling() -> None:
    """If noise is drawn around a statistic of the batch, a part's noise is drawn around the part's statistic."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = model(batch)
        rates = (outputs - outputs.mean(0)).exp()
        return {"count": ((torch.poisson(rates) * outputs).sum(), float(len(batch)))}

    assert report_on(terms).verdict == "coupled"


def test_noise_inside_a_module_is_compared_in_train_mode() -> None:
    """Such dropout cannot be turned off by an attribute."""
    report = report_on(squares, network(Noisy()))
    assert report.verdict == "separate", report.message
    assert report.train_mode


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_noise_is_the_same_noise(*, reentrant: bool) -> None:
    """A checkpointed layer draws again in its backward pass, from the state it had."""

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, features: Tensor) -> Tensor:
            states: Tensor = checkpoint(self._noisy, features, use_reentrant=reentrant)
            return states

        def _noisy(self, features: Tensor) -> Tensor:
            states: Tensor = self.layer(features)
            return states * torch.randn_like(states)

    report = report_on(diffusion, network(Recomputing()))
    assert report.verdict == "separate", report.message
    assert report.gradient_error < 1e-10


def test_a_users_own_generator_draws_the_same_numbers_again() -> None:
    """The generator advances from pass to pass; every comparison starts from its first known state."""
    generator = torch.Generator().manual_seed(3)

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        first = torch.randn(batch.shape, generator=generator)
        second = torch.randn(len(batch), 1, generator=generator)
        return {"noise": (model(batch + first * second).square().sum(), float(len(batch)))}

    report = report_on(terms)
    assert report.verdict == "separate", report.message
