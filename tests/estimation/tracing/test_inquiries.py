"""Traces of workloads that ask torch and tensors what a trace has to answer as a card does."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.estimation.trace import Category, Trace
from batchwright.estimation.tracing.session import trace
from batchwright.schemas.estimates import Loop
from batchwright.workloads.base import LossTerms
from tests.support.factories import python_spec
from tests.support.traced import most_bytes, traced_on_cuda
from tests.support.traced_models import Tokens

CAPACITY = 40
"""Least rows of ``Routed``."""
RARE = 0.1
"""Chance by which ``Drawn`` leaves out a part."""
WIDE = 4096
"""Outputs of the layer of ``Tangent``."""
COPIES = 64
"""Copies of each gradient that the steps of ``Patient`` after its first one hold."""


class Inquisitive(nn.Module):
    """Chooses a device as many programs do, and makes a buffer on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        import bitsandbytes  # noqa: F401 - looks for kernels of torch's CUDA build if there is a card

        self.has_card = torch.cuda.is_available()
        if self.has_card:
            torch.cuda.set_device(0)
            torch.cuda.reset_peak_memory_stats()
            with torch.cuda.device(0):
                free, total = torch.cuda.mem_get_info()
            assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
        device = "cuda" if self.has_card else "cpu"
        self.scale = torch.tril(torch.ones(16, 16, device=device))[0]
        self.offsets = [torch.ones(16).to(device)]
        self.host = torch.ones(16)
        self.noise = torch.Generator(device=device)
        self.tokens = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        basis, _ = torch.linalg.qr(torch.randn(16, 16).cpu())
        self.register_buffer("basis", basis * torch.randn(16).to("cpu"))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.frozen = nn.TransformerEncoder(layer, 1).requires_grad_(requires_grad=False).eval()

    def train(self, mode: bool = True) -> "Inquisitive":  # noqa: FBT001, FBT002 - as torch declares it
        """Leave the frozen part in eval mode, in which torch would run its fused operators."""
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """A number for each token."""
        assert (
            not ids.is_cuda
            or torch.cuda.get_device_properties(ids.device).major == torch.cuda.get_device_capability()[0]
        )
        assert not ids.is_cuda or torch.cuda.get_device_name()
        tokens = self.norm((self.tokens(ids) @ self.basis).transpose(1, 2)).transpose(1, 2)
        with torch.no_grad():
            context = self.frozen(tokens, src_key_padding_mask=ids < 0)
        assert not self.host.is_cuda
        assert self.noise.device.type == ids.device.type
        tokens += torch.randn(tokens.shape, generator=self.noise.manual_seed(1), device=self.noise.device)
        longest = int(np.asarray((ids >= 0).sum(1).cpu()).max())
        numbers: Tensor = (tokens * self.scale + self.offsets[0] + context)[:, :longest].sum(-1)
        return numbers


class Asks(Tokens):
    """Trains the module above."""

    def build_model(self) -> nn.Module:
        """Small."""
        return Inquisitive()

    def make_batch(self, size: int) -> Tensor:
        """Pinned where there is a card."""
        batch = super().make_batch(size)
        return batch.pin_memory() if torch.cuda.is_available() else batch

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum."""
        return {"loss": (model(batch).sum(), len(batch))}


class Weighs(Tokens):
    """Has two terms, whose weights the engine finds with copies of the batches."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Sums over sequences and over tokens."""
        logits = model(batch)
        return {"loss": (logits.sum(), len(batch)), "squares": ((logits**2).sum(), batch.numel())}


class Routed(Tokens):
    """Counts rows that are known only at run time, and takes no fewer than the capacity."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over rows for each token."""
        logits = model(batch)
        rows = int(max(logits.argmax(-1).max() + 1, CAPACITY))
        return {"loss": (logits[..., None].expand(-1, -1, -1, rows).contiguous().sum(), len(batch))}


class Drawn(Tokens):
    """Leaves out the logits' copies by a random number, as adapters of LoHa do, or takes them by one."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over the copies."""
        logits = model(batch)
        runs = [torch.rand(1) > RARE, not torch.rand([]) < RARE]
        copies = logits[..., None].expand(-1, -1, -1, CAPACITY if all(runs) else 1).contiguous()
        return {"loss": (copies.sum(), len(batch))}


class Wary(Tokens):
    """Refuses numbers that a run never has, and copies the logits unless all of them are zero, as optimizers do."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over the copies."""
        logits = model(batch)
        if not torch.isfinite(logits).all() or torch.isnan(logits).any():
            raise ValueError("the logits are no numbers")
        copies = logits[..., None].expand(-1, -1, -1, CAPACITY if logits.any() else 1).contiguous()
        return {"loss": (copies.sum(), len(batch))}


class Matched(Tokens):
    """Matches the logits of each sequence with five numbers, as losses of detection do."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over the pairs."""
        logits = model(batch)
        pairs = [import_module("scipy.optimize").linear_sum_assignment(costs.detach().cpu()[:, :5]) for costs in logits]
        rows = torch.cat([torch.as_tensor(pair[0]) for pair in pairs])
        columns = torch.cat([torch.as_tensor(pair[1]) for pair in pairs])
        return {"loss": (logits.flatten(0, 1)[rows, columns].sum(), len(batch))}


class Patient(torch.optim.Optimizer):
    """Only remembers in its first step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # without a loss
        """Hold copies of each gradient from the second step on."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    parameter.data.sub_(parameter.grad.expand(COPIES, *parameter.shape).contiguous().mean(0))
                self.state[parameter]["seen"] = True


class Waits(Tokens):
    """Trains with the optimizer above."""

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Of all parameters."""
        return Patient(parameters)


class Tangent(Tokens):
    """Differentiates forward, along the embeddings: the tangents of weights are zeros, which take no memory."""

    def build_model(self) -> nn.Module:
        """A wide layer."""
        return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, WIDE), nn.GELU())

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum of outputs and tangents."""
        assert isinstance(model, nn.Sequential)
        tokens = model[0](batch)
        found = torch.func.jvp(model[1:], (tokens,), (torch.ones_like(tokens),))
        return {"loss": (found[0].sum() + found[1].sum(), len(batch))}


class Unpaired(Tokens):
    """Returns sums without weights."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum."""
        return {"loss": model(batch).sum()}


class Decorated(Tokens):
    """Has a function that a library compiles while it is imported, and that nobody calls."""

    def build_model(self) -> nn.Module:
        """Of tokens."""
        torch.compile(lambda tensor: tensor)
        return super().build_model()


def tangent() -> Tokens:
    """Differentiates forward."""
    return Tangent()


def unpaired() -> Tokens:
    """Returns no pairs."""
    return Unpaired()


def decorated() -> Tokens:
    """Compiles what it does not call."""
    return Decorated()


def asks() -> Tokens:
    """Asks for the card, and reads numbers."""
    return Asks()


def weighs() -> Tokens:
    """Has two terms."""
    return Weighs()


def routed() -> Tokens:
    """Has a capacity."""
    return Routed()


def drawn() -> Tokens:
    """Leaves out a part by chance."""
    return Drawn()


def wary() -> Tokens:
    """Checks its numbers."""
    return Wary()


def matched() -> Tokens:
    """Matches."""
    return Matched()


def waits() -> Tokens:
    """Has a first step of its own."""
    return Waits()


@pytest.fixture(scope="module")
def on_card() -> dict[str, Trace]:
    """Traces on a card, in one process."""
    cases = [
        {
            "name": name,
            "spec": python_spec(f"tests.estimation.tracing.test_inquiries:{name}").model_dump(mode="json"),
            "sizes": [2],
            "accumulates": True,
            "compute_capability": [8, 6],
        }
        for name in ("asks", "tangent")
    ]
    return {name: taken for name, (taken,) in traced_on_cuda(cases).items()}


def test_a_workload_may_ask_for_the_card_and_read_known_values(on_card: dict[str, Trace]) -> None:
    """A device chosen by ``is_available``, NumPy, a tensor moved to the CPU, and torch's fused layers in eval mode."""
    assert most_bytes(on_card["asks"]) > 0


def test_such_a_workload_is_traced_on_the_cpu_too() -> None:
    """Where no card answers."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:asks"), 2, accumulates=True)
    assert most_bytes(taken) > 0


def test_batches_are_copied_without_their_storages() -> None:
    """In a trace they have none to copy."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:weighs"), 2, accumulates=True)
    assert most_bytes(taken) > 0


def test_an_unknown_number_is_no_less_than_what_it_is_compared_with() -> None:
    """The capacity of an expert is allocated where the numbers of its tokens are not known."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:routed"), 2, accumulates=True)
    assert max(taken.sizes) == 2 * 6 * 50 * CAPACITY * 4
    assert taken.notes == ("the workload reads whole numbers known only at run time: a stand-in was used",)


def test_the_first_step_of_a_workloads_own_optimizer_is_not_that_of_later_updates() -> None:
    """The measured update is a later one, with all that such a step holds."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:waits"), 2, accumulates=True)
    largest = 50 * 32 * 4
    assert most_bytes(taken, stretch="first-update") < COPIES * largest < most_bytes(taken, stretch="measured-update")


def test_what_a_run_rarely_leaves_out_is_traced() -> None:
    """Whichever way round the workload compares its random number."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:drawn"), 2, accumulates=True)
    assert 2 * 6 * 50 * CAPACITY * 4 in taken.sizes
    assert taken.notes == ()


def test_unknown_numbers_are_those_that_a_workload_expects() -> None:
    """They pass its checks, and are not all zero."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:wary"), 2, accumulates=True)
    assert 2 * 6 * 50 * CAPACITY * 4 in taken.sizes
    assert taken.notes == ("the workload reads conditions known only at run time: a stand-in was used",)


def test_matchings_are_of_as_many_pairs_as_in_a_run() -> None:
    """Which pairs depends on the outputs; their memory does not."""
    pytest.importorskip("scipy.optimize")
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:matched"), 2, accumulates=True)
    assert most_bytes(taken) > 0
    assert taken.notes == ("the workload reads whole numbers known only at run time: a stand-in was used",)


def test_tangents_that_are_zero_take_no_memory(on_card: dict[str, Trace]) -> None:
    """In a loss that differentiates forward, such as that of consistency models."""
    taken = on_card["tangent"]
    weights = {block for block, nbytes in enumerate(taken.sizes) if nbytes == WIDE * 32 * 4}
    assert weights
    assert all(taken.categories[block] is not Category.ACTIVATIONS for block in weights)


@pytest.mark.parametrize("loop", ["plain", "hugging-face", "lightning"])
def test_other_loops_name_a_term_that_is_no_pair(loop: Loop) -> None:
    """As Batchwright's own loop does."""
    spec = python_spec("tests.estimation.tracing.test_inquiries:unpaired")
    with pytest.raises(WorkloadError, match="loss term `loss` must be"):
        trace(spec, 2, accumulates=True, loop=loop)


def test_a_function_that_is_compiled_and_never_called_is_no_note() -> None:
    """Libraries compile functions while they are imported."""
    taken = trace(python_spec("tests.estimation.tracing.test_inquiries:decorated"), 2, accumulates=True)
    assert taken.notes == ()
