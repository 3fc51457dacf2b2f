"""The check for coupled samples: sums over samples pass, everything else is refused with its name and a remedy."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.errors import WorkloadError
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.coupling.check import check_coupling, check_spec_coupling
from batchwright.training.coupling.precision import LIMITS
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.splitting import sliced
from batchwright.workloads.base import LossTerms
from batchwright.workloads.build import build_workload
from tests.support.coupled import (
    WIDTH,
    Case,
    Centred,
    Overwriting,
    ScaledBackward,
    Shifted,
    Switch,
    Terms,
    Unseeded,
    in_batch_negatives,
    squares,
    with_auxiliary,
)
from tests.support.factories import gpt_spec, mlp_spec, resnet_spec, transformers_spec

CPU = torch.device("cpu")
LARGEST_ERROR = LIMITS["fp64"].largest_error
TEXT = {"batch": {"sequence_length": 12}}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 256}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 256}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
MIXTRAL = {"model_type": "mixtral", **TINY, "num_key_value_heads": 2, "num_local_experts": 4}
MIXTRAL |= {"router_jitter_noise": 0.1, "attention_dropout": 0.1}


def _check(model: nn.Module, terms: Terms = squares, samples: int = 8, batch: object = None) -> CouplingReport:
    torch.manual_seed(0)
    case = Case(model, terms)
    return check_coupling(model, case, sliced(case.make_batch(samples) if batch is None else batch), CPU)


def _check_spec(spec: WorkloadSpec, samples: int = 4) -> CouplingReport:
    return check_spec_coupling(spec, build_workload(spec), CPU, samples)


def _network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))


def _gpt_with_dropout() -> WorkloadSpec:
    document = gpt_spec().model_dump(mode="json")
    document["model"]["architecture"]["dropout"] = 0.2
    return parse_spec(document)


SEPARATE: dict[str, WorkloadSpec] = {
    "mlp": mlp_spec(),
    "gpt": _gpt_with_dropout(),
    "gpt, recomputing": gpt_spec(activation_checkpointing=True, precision="bf16"),
    "gpt2": transformers_spec("causal-lm", GPT2, **TEXT),
    "bert": transformers_spec("masked-lm", {"model_type": "bert", **TINY}, **TEXT),
    "llama": transformers_spec("causal-lm", {"model_type": "llama", **TINY}, **TEXT),
    "mixtral": transformers_spec("causal-lm", MIXTRAL, **TEXT),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_sums_over_samples_pass_in_train_mode(name: str) -> None:
    """LayerNorm, RMSNorm and routed experts do not couple samples; dropout and jitter are disabled, not compared."""
    report = _check_spec(SEPARATE[name])
    assert not report.coupled, report.message
    assert report.culprits == ()
    assert report.train_mode
    assert max(report.loss_error, report.gradient_error) < LARGEST_ERROR / 10


def test_dropout_costs_no_pass_of_its_own() -> None:
    """A pass with random numbers would only show that it draws some; without an active module they are looked for."""
    passes = []

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        passes.append(len(batch))
        return squares(model, batch)

    report = _check(_network(), terms)
    assert passes == [2, 8, 2, 6], "the update is by the first part alone"
    without, passes = passes, []
    assert _check(_network(nn.Dropout(0.5)), terms) == replace(report, loss_error=ANY, gradient_error=ANY)
    assert passes == without


@pytest.mark.parametrize(
    "silent",
    [
        lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=16, dropout=0.5, batch_first=True),
    ],
)
def test_dropout_inside_torchs_own_modules_is_disabled(silent: Callable[[], nn.Module]) -> None:
    """LSTM and attention have their probability in an attribute, which is restored."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = model(batch)
        states = outputs[0] if isinstance(outputs, tuple) else outputs
        return {"squares": ((states - 1).square().sum(), float(len(batch)))}

    torch.manual_seed(0)
    model = silent()
    before = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name != "training"
    ]
    report = _check(model, terms, batch=torch.randn(4, 5, WIDTH))
    assert not report.coupled, report.message
    assert report.train_mode
    assert all(vars(module)[name] is value for module, name, value in before)


def test_the_first_batch_norm_is_named() -> None:
    """A ResNet is refused; its BatchNorms are listed in order, and later modules are not."""
    report = _check_spec(resnet_spec())
    assert report.coupled
    assert report.loss_error > 1e-3
    assert report.gradient_error > 0.1
    assert (report.culprits[0].kind, report.culprits[0].name) == ("module", "stem.1")
    assert {culprit.type_name for culprit in report.culprits} == {"BatchNorm2d"}
    assert "`stem.1` (BatchNorm2d" in report.message
    assert "GroupNorm" in report.message


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH).eval()])
def test_the_remedies_for_batch_norm_pass(norm: nn.Module) -> None:
    """GroupNorm, LayerNorm and frozen statistics do not couple samples."""
    report = _check(_network(norm))
    assert not report.coupled, report.message
    assert report.train_mode


def test_a_module_that_refuses_one_sample_is_named() -> None:
    """BatchNorm cannot normalize a half of one sample, which is reported and not raised."""
    report = _check(_network(nn.BatchNorm1d(WIDTH)), samples=2)
    assert report.coupled
    assert [(culprit.name, culprit.type_name) for culprit in report.culprits] == [("1", "BatchNorm1d")]
    assert "Expected more than 1 value per channel" in report.message
    assert "inf" not in report.message


def test_a_spec_whose_parts_are_refused_is_compared_by_halves() -> None:
    """Channels of one value, in the last layers of a ResNet on small images: BatchNorm refuses one sample of four."""
    report = _check_spec(resnet_spec(batch={"image_size": 8}))
    assert (report.verdict, report.samples, report.problem) == ("coupled", 4, None), report.message
    assert report.culprits[0].type_name == "BatchNorm2d"


@pytest.mark.parametrize("refusal", [ValueError, AssertionError])
@pytest.mark.parametrize(("by_data", "verdict"), [(True, "not-compared"), (False, "coupled")])
def test_a_spec_that_refuses_odd_numbers_is_compared_by_halves(
    refusal: type[Exception], verdict: str, *, by_data: bool
) -> None:
    """Mixup pairs the samples of a batch. Where data comes in pairs, the division of a batch is a guess."""

    class Pairs(Case):
        def make_batch(self, size: int) -> Tensor:
            if by_data and size % 2:
                raise refusal
            return torch.randn(size, WIDTH)

    def mixed(model: nn.Module, batch: Tensor) -> LossTerms:
        if not by_data and len(batch) % 2:
            raise refusal
        return squares(model, batch + batch.flip(0))

    report = check_spec_coupling(mlp_spec(), Pairs(_network(), mixed), CPU)
    assert (report.verdict, report.samples) == (verdict, 4), report.message


def test_arithmetic_between_modules_is_blamed_on_the_module_that_does_it() -> None:
    """Neither the layers nor later modules are at fault."""
    report = _check(_network(Centred()))
    assert [(culprit.name, culprit.type_name) for culprit in report.culprits] == [("1", "Centred")]


def test_a_module_and_a_term_are_distinguished() -> None:
    """When the module's output is corrected, only the term that is at fault by itself is found."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = model(batch)
        return {**squares(lambda _: outputs, batch), "spread": (outputs.var(0).sum() * len(batch), len(batch))}  # type: ignore[arg-type]

    report = _check(_network(nn.BatchNorm1d(WIDTH)), terms)
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("module", "1"), ("term", "spread")]


def test_in_batch_negatives_are_a_terms_fault() -> None:
    """The loss couples samples, and no module does."""
    report = _check(_network(nn.ReLU()), in_batch_negatives)
    assert report.coupled
    assert min(report.loss_error, report.gradient_error) > 0.05
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "contrastive")]
    assert "GradCache" in report.message


def test_a_load_balancing_loss_is_a_terms_fault() -> None:
    """The statistic a router reports belongs to its term, not to the module; the routed samples are not coupled."""
    torch.manual_seed(0)
    report = _check(Switch(), with_auxiliary, samples=32)
    assert report.coupled
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "auxiliary")]
    assert "load-balancing" in report.message


def test_halves_that_agree_by_chance_are_not_the_last_word() -> None:
    """Each half fills the experts evenly here, as the whole batch does; another split shows the coupling."""
    batch = torch.randn(2, WIDTH).repeat(4, 1)
    model = Switch()
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.weight[0] = batch[0] - batch[1]
        model.router.bias.copy_(torch.tensor([-(batch[0] @ batch[0] - batch[1] @ batch[1]) / 2, 0.0]))
    report = _check(model, with_auxiliary, batch=batch[[0, 1, 0, 1]])
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "auxiliary")]


def test_the_auxiliary_loss_of_transformers_is_a_terms_fault() -> None:
    """Mixtral computes the loss when the router's logits are requested."""

    class Workload:
        def __init__(self) -> None:
            self._plain = build_workload(SEPARATE["mixtral"])
            self.build_model, self.make_batch = self._plain.build_model, self._plain.make_batch

        def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> LossTerms:
            outputs = model(**batch, output_router_logits=True, use_cache=False)
            terms = self._plain.loss_terms(lambda **_: outputs, batch)  # type: ignore[arg-type]
            weight = float(len(batch["labels"]))
            return {**terms, "router_aux": (outputs.aux_loss * weight, weight)}

    report = check_spec_coupling(SEPARATE["mixtral"], Workload(), CPU)
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "router_aux")]


@pytest.mark.parametrize("samples", [2, 8])
@pytest.mark.parametrize("weight", [lambda batch: float(len(batch)), lambda _: 1.0])
def test_a_mean_is_named(weight: Callable[[Tensor], float], samples: int) -> None:
    """A mean is found whatever its weight, where halves of equal size would agree by chance too."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        return {"error": (F.mse_loss(model(batch), torch.ones(WIDTH).expand_as(batch)), weight(batch))}

    report = _check(_network(), terms, samples=samples)
    assert report.coupled
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "error")]
    assert "not the mean" in report.message


def test_a_weight_that_does_not_add_up_is_named() -> None:
    """The sums are right and their weight is not."""
    report = _check(_network(), lambda model, batch: {"squares": (model(batch).square().sum(), 1.0)})
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "squares")]
    assert "weights do not add up" in report.message


def test_a_penalty_that_has_no_samples_passes() -> None:
    """A term with an equal value and weight 1 for every micro-batch has the full batch's mean."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return {**squares(model, batch), "penalty": (penalty, 1.0)}

    report = _check(_network(), terms)
    assert not report.coupled, report.message


def test_coupling_of_the_gradient_alone_is_found() -> None:
    """The losses agree to rounding: a check that looked at them alone would pass this."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = ScaledBackward.apply(model(batch))  # type: ignore[no-untyped-call] # torch's types
        return {"squares": (outputs.square().sum(), float(len(batch)))}

    report = _check(_network(), terms)
    assert report.loss_error < LARGEST_ERROR / 10
    assert report.gradient_error > 0.01
    assert report.coupled
    assert [culprit.kind for culprit in report.culprits] == ["gradient"]
    assert report.culprits[0].name in {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_coupling_of_the_loss_alone_is_found() -> None:
    """A detached statistic changes no gradient."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = model(batch)
        return {"squares": (outputs.square().sum() + outputs.detach().var(0).sum() * len(batch), len(batch))}

    report = _check(_network(), terms)
    assert report.loss_error > 0.01
    assert report.gradient_error < LARGEST_ERROR / 10
    assert [culprit.kind for culprit in report.culprits] == ["term"]


def test_a_gradient_that_is_zero_but_for_rounding_is_not_flagged() -> None:
    """The rounding of a zero gradient is compared on the scale of the other gradients."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        labels = torch.zeros(len(batch), dtype=torch.long)
        return {"softmax": (F.cross_entropy(model(batch), labels, reduction="sum"), float(len(batch)))}

    torch.manual_seed(0)
    model = Shifted()
    batch = torch.randn(8, WIDTH)
    noise = []
    for part in (batch, batch[:4], batch[4:]):
        (gradient,) = torch.autograd.grad(terms(model, part)["softmax"][0], model.shift)
        noise.append(float(gradient))
    assert abs(noise[0] - noise[1] - noise[2]) > LARGEST_ERROR * abs(noise[0])
    report = _check(model, terms, batch=batch)
    assert not report.coupled, report.message


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_norm_in_eval_mode_couples_nothing(*, whole: bool) -> None:
    """The model is compared in the modes of the caller, which the report does not call a makeshift."""
    model = _network(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    (model if whole else model[1]).eval()
    modes = [module.training for module in model.modules()]
    report = _check(model)
    assert (report.verdict, report.train_mode) == ("separate", True)
    assert "eval mode" not in report.message
    assert [module.training for module in model.modules()] == modes


def test_randomness_that_cannot_be_disabled_is_compared_in_eval_mode() -> None:
    """The report says so, and modules that couple samples only in training are found by type."""
    model = _network(Unseeded(), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH))
    report = _check(model)
    assert not report.train_mode
    assert report.loss_error < LARGEST_ERROR
    assert report.coupled
    assert [(culprit.name, culprit.error) for culprit in report.culprits] == [("2", None)]
    assert "eval mode" in report.message
    assert "would still not give" in report.message
    assert not _check(_network(Unseeded())).coupled


def test_a_loss_with_its_own_randomness_is_not_refused() -> None:
    """Numbers from a new generator in each pass cannot be matched: the report says so, without a verdict."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        return squares(model, batch + torch.from_numpy(np.random.default_rng().random(batch.shape)))

    report = _check(_network(), terms)
    assert report.verdict == "not-compared"
    assert "from run to run" in report.message


def test_draws_that_the_first_part_does_not_make_are_found() -> None:
    """A permutation of two samples or fewer is left out: the update's pass draws nothing, the batch's does."""

    def mixed(model: nn.Module, batch: Tensor) -> LossTerms:
        return squares(model, batch + batch[torch.randperm(len(batch))] if len(batch) > 2 else batch)

    report = _check(_network(), mixed)
    assert report.verdict != "separate"
    assert "first part does not draw" not in report.message


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (lambda model, batch: {"log": ((model(batch) * 0).log().sum(), len(batch))}, "loss term `log` is -inf"),
        (lambda model, batch: {"root": ((model(batch) * 0).sqrt().sum(), len(batch))}, "gradient of `0.weight`"),
        (lambda model, batch: {"none": (model(batch).sum(), 0.0)}, "reaches no parameter"),
    ],
)
def test_numbers_that_are_not_finite_cannot_be_compared(terms: Terms, words: str) -> None:
    """NaN compares as neither larger nor smaller, so there is no verdict."""
    report = _check(_network(), terms)
    assert report.verdict == "not-compared"
    assert words in report.message


def test_a_loss_that_is_finite_only_for_the_whole_batch_is_coupled() -> None:
    """A loss that is infinite for a part is coupled."""

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        return {"half": (model(batch).sum() / (len(batch) - 1), float(len(batch)))}

    report = _check(_network(), terms, samples=2)
    assert report.coupled
    assert "of its parts" in report.message


def test_a_report_that_is_not_a_number_is_coupled() -> None:
    """An error of NaN counts as coupled, in a report without a problem."""
    passed = _check(_network())
    assert not passed.coupled
    assert replace(passed, gradient_error=float("nan")).coupled


def test_a_model_that_overwrites_its_input_gets_a_fresh_one() -> None:
    """Each run gets the batch unchanged."""
    batch = torch.randn(4, WIDTH)
    kept = batch.clone()
    report = _check(nn.Sequential(Overwriting(), _network()), batch=batch)
    assert not report.coupled, report.message
    assert torch.equal(batch, kept)


def test_a_spec_is_checked_without_touching_the_generators() -> None:
    """Building the model and the batch draws numbers from a fixed seed."""
    before = torch.get_rng_state()
    first = _check_spec(resnet_spec())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert _check_spec(resnet_spec()) == first


def test_nothing_is_kept_alive() -> None:
    """Activations and gradients are freed without the garbage collector."""
    seen: list[weakref.ref[Tensor]] = []

    def terms(model: nn.Module, batch: Tensor) -> LossTerms:
        outputs = model(batch)
        seen.append(weakref.ref(outputs))
        return {"squares": (outputs.square().sum(), float(len(outputs)))}

    gc.collect()
    gc.disable()
    try:
        assert _check(_network(nn.BatchNorm1d(WIDTH)), terms).coupled
        assert seen
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(4, WIDTH), "y": torch.zeros(3)}, r"batch\['y'\]` has the shape \(3,\)"),
        (torch.zeros(1, WIDTH), "needs 2"),
        ([], "no tensor"),
    ],
)
def test_a_batch_that_cannot_be_halved_is_the_workloads_error(batch: object, words: str) -> None:
    """The shapes are named."""
    with pytest.raises(WorkloadError, match=words):
        _check(_network(), batch=batch)


def test_a_term_that_is_no_pair_is_the_workloads_error() -> None:
    """The message is that of the engine."""
    with pytest.raises(WorkloadError, match="`squares` must be"):
        _check(_network(), lambda model, batch: {"squares": model(batch).sum()})


@pytest.mark.parametrize("config", [torch.ones(3), {}, {"a": 1}, "name", None])
def test_any_object_may_be_named_config(config: object) -> None:
    """Only the configurations of transformers state the kernel of the experts."""
    model: Any = _network(nn.LayerNorm(WIDTH))
    model.config = config
    report = _check(model)
    assert (report.verdict, report.precision) == ("separate", "fp64"), report.message


def test_a_part_without_weight_adds_nothing() -> None:
    """The loss of the first part is 0 / 0, as a mean over the samples that count, times their number."""

    def masked_mean(model: nn.Module, batch: Tensor) -> LossTerms:
        counts = (batch[:, 0] > 0).to(batch.dtype)
        number = counts.sum()
        return {"loss": ((model(batch).square().sum(1) * counts).sum() / number * number, number)}

    torch.manual_seed(0)
    batch = torch.randn(6, WIDTH)
    batch[:, 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    model = nn.Linear(WIDTH, WIDTH)
    assert check_coupling(model, Case(model, masked_mean), sliced(batch), CPU).verdict == "separate"
