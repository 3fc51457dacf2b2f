"""Rounding does not affect the verdict of the check for coupled samples, for any processor's arithmetic."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.training.coupling.check import check_coupling, check_spec_coupling
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.splitting import sliced
from batchwright.workloads.base import LossTerms
from batchwright.workloads.build import build_workload
from tests.support.coupled import WIDTH, Case, Shifted, Terms, in_batch_negatives, squares
from tests.support.factories import transformers_spec
from tests.support.paths import ROOT

CPU = torch.device("cpu")
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 32, "vocab_size": 256}


class Single(nn.Module):
    """The identity for fp32 only, like some custom kernels."""

    def forward(self, features: Tensor) -> Tensor:
        """Keep the values."""
        if features.dtype != torch.float32:
            raise TypeError(f"no kernel for {features.dtype}")
        return features


class Rounding(nn.Module):
    """A cast to fp32 and back, by bit operations that cannot be widened."""

    def forward(self, features: Tensor) -> Tensor:
        """Nearly the same values."""
        rounded = torch.from_numpy(features.detach().numpy().astype("float32")).to(features.dtype)
        return features + (rounded - features.detach())


def softmax_terms(model: nn.Module, batch: Tensor) -> LossTerms:
    """A sum over samples to which a shift of all logits adds nothing: its gradient is rounding alone."""
    labels = torch.zeros(len(batch), dtype=torch.long)
    return {"softmax": (F.cross_entropy(model(batch), labels, reduction="sum"), float(len(batch)))}


def cancelling_terms(model: nn.Module, batch: Tensor) -> LossTerms:
    """A sum over samples of which half are positive and half negative, so that little is left of it."""
    features, signs = batch[:, :WIDTH], batch[:, WIDTH:]
    return {"signed": ((model(features).square() * 1e3 * signs).sum(), float(len(batch)))}


def report_on(model: nn.Module, terms: Terms, batch: Tensor) -> CouplingReport:
    """The check of a custom model."""
    return check_coupling(model, Case(model, terms), sliced(batch), CPU)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", [nn.Identity, Single, Rounding])
def test_a_gradient_that_is_rounding_alone_is_not_flagged(kernel: type[nn.Module], seed: int) -> None:
    """The loss passes in fp64, in fp32 if a kernel has no fp64, and with a kernel that rounds to fp32."""
    torch.manual_seed(seed)
    report = report_on(nn.Sequential(kernel(), Shifted()), softmax_terms, torch.randn(64, WIDTH))
    assert report.verdict == "separate", report.message
    assert report.precision == ("fp32" if kernel is Single else "fp64")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", [nn.Identity, Single, Rounding])
def test_a_loss_whose_terms_cancel_is_not_flagged(kernel: type[nn.Module], seed: int) -> None:
    """Pairs of equal samples with opposite signs: their sum is rounding, and its size is no scale."""
    torch.manual_seed(seed)
    signs = torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    batch = torch.cat((torch.randn(32, WIDTH).repeat_interleave(2, 0), signs), dim=1)
    report = report_on(nn.Sequential(kernel(), nn.Linear(WIDTH, WIDTH)), cancelling_terms, batch)
    assert report.verdict == "separate", report.message


@pytest.mark.parametrize("kernel", [Single, Rounding])
@pytest.mark.parametrize("coupled", [(nn.BatchNorm1d(WIDTH), squares), (nn.ReLU(), in_batch_negatives)])
def test_coupling_is_found_in_fp32_too(kernel: type[nn.Module], coupled: tuple[nn.Module, Terms]) -> None:
    """The allowance for rounding hides no larger difference."""
    torch.manual_seed(0)
    norm, terms = coupled
    model = nn.Sequential(kernel(), nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
    report = report_on(model, terms, torch.randn(8, WIDTH))
    assert report.verdict == "coupled"
    assert report.gradient_error > 0.05


def test_code_that_requests_fp32_gets_fp64() -> None:
    """Norms and softmaxes of transformers request fp32: no fp32 rounding remains in loss and gradient."""
    spec = transformers_spec("causal-lm", LLAMA, batch={"sequence_length": 12}, precision="bf16")
    report = check_spec_coupling(spec, build_workload(spec), CPU)
    assert report.precision == "fp64"
    assert max(report.loss_error, report.gradient_error) < 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_verdicts_are_those_of_any_processor(capability: str) -> None:
    """Torch's kernels for narrower vectors, one thread, and other sums of the maths library."""
    environment = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "rounding_alone or terms_cancel or in_fp32_too"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
