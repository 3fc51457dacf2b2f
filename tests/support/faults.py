"""Helpers of the tests of the update engine: ragged samples, errors of gradients, and faults injected into passes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils import _pytree

from batchwright.workloads.base import IGNORED_LABEL, LossTerms, count_labels, pad_tokens
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec

Gradients: TypeAlias = dict[str, Tensor]
"""Gradients by parameter name, without parameters that have none."""

# --- ragged samples, and a model that counts them ---------------------------------------------------------------------


def ragged_tokens(count: int, longest: int = 16) -> list[Tensor]:
    """Token samples of 2 to ``longest`` tokens, equal on every call."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def token_batch(samples: Sequence[Tensor], start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
    """``samples[start:stop]``, padded to the longest of them, with their numbers."""
    numbers = torch.arange(len(samples))[start:stop]
    return {**pad_tokens(list(samples[start:stop])), "sample": numbers}


def token_batches(samples: Sequence[Tensor], *sizes: int) -> list[dict[str, Tensor]]:
    """All ``samples`` in batches of these sizes, each padded by itself."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    assert ends[-1] == len(samples)
    return [token_batch(samples, end - size, end) for end, size in zip(ends, sizes, strict=True)]


class CountingGpt(nn.Module):
    """A small GPT with tied weights, and an entry per sample whose gradient counts how often it was committed."""

    def __init__(self, samples: int, **changes: Any) -> None:
        super().__init__()
        architecture = {"name": "gpt", "layers": 2, "heads": 2, "width": 16, "vocabulary_size": 64}
        spec = gpt_spec(model={"kind": "reference", "architecture": architecture}, **changes)
        torch.manual_seed(0)
        self.gpt = build_model(spec, build_workload(spec))
        self.entries = nn.Parameter(torch.zeros(samples))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.gpt(ids)
        return logits


def token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """Next-token cross-entropy in the model's own precision, summed, and its number of targets."""
    labels = batch["labels"][:, 1:]
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return loss + cast("CountingGpt", model).entries[batch["sample"]].sum(), float(count_labels(labels))


def count_tokens(batch: Mapping[str, Tensor]) -> float:
    """The weight of ``token_loss``."""
    return float(count_labels(batch["labels"][:, 1:]))


def times_committed(found: Gradients, samples: Sequence[Tensor]) -> list[int]:
    """Count of each sample in the gradient of ``token_loss`` over all ``samples``."""
    times = found["entries"].double() * count_tokens(token_batch(samples))
    assert (times - times.round()).abs().max() < 1e-4
    return [int(count) for count in times.round().tolist()]


# --- measuring --------------------------------------------------------------------------------------------------------

AnyLoss: TypeAlias = Callable[[nn.Module, Any], LossTerms | tuple[Tensor, "Tensor | float"]]


def gradients(model: nn.Module) -> Gradients:
    """Copies of the gradients in ``.grad``."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def exact_gradient(model: nn.Module, batch: Any, loss: AnyLoss) -> Gradients:
    """The full batch's gradient in fp64: each term's sum over its weight, in one pass, without any code under test."""
    wide = copy.deepcopy(model).double()
    wide.zero_grad()
    answer = loss(wide, _pytree.tree_map(_in_fp64, batch))
    terms = [answer] if isinstance(answer, tuple) else list(answer.values())
    torch.autograd.backward(torch.stack([loss_sum / weight for loss_sum, weight in terms]).sum())
    return gradients(wide)


def _in_fp64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def relative_error(found: Gradients, truth: Gradients) -> float:
    """The largest over all tensors of ``max |found - truth| / max |truth|``."""
    assert found.keys() == truth.keys()
    return max(
        float((found[name].double() - tensor).abs().max() / tensor.abs().max()) for name, tensor in truth.items()
    )


def relative_distance(found: Gradients, truth: Gradients) -> float:
    """Return the L2 norm of the difference over that of ``truth``, all tensors together.

    Weights of two runs are compared by it too: a single weight may be near zero, and its rounding is that of the sums
    that it was part of.
    """
    assert found.keys() == truth.keys()
    ours, theirs = (
        torch.cat([tensors[name].detach().flatten().double() for name in truth]) for tensors in (found, truth)
    )
    return float((ours - theirs).norm() / theirs.norm())


def bit_equal(found: Gradients, truth: Gradients) -> bool:
    """Return whether all tensors are equal to the last bit."""
    return found.keys() == truth.keys() and all(torch.equal(found[name], tensor) for name, tensor in truth.items())


def steps_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Gradients]:
    """A list to which each later step appends the gradients of the step."""
    steps: list[Gradients] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(gradients(model)))
    return steps


# --- faults -----------------------------------------------------------------------------------------------------------


def out_of_memory() -> Exception:
    """The error that torch raises when a GPU is full."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def plain_out_of_memory() -> Exception:
    """The error that older code and other backends raise."""
    return RuntimeError("CUDA error: out of memory")


class _Point(torch.autograd.Function):
    """The identity, which records each pass."""

    @staticmethod
    def forward(context: Any, value: Tensor, faults: Faults, module: str) -> Tensor:
        """Record the forward pass."""
        context.faults, context.module, context.rows = faults, module, len(value)
        faults.record_pass(f"forward of {module}", len(value))
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradient: Any) -> Any:
        """Record the backward pass."""
        context.faults.record_pass(f"backward of {context.module}", context.rows)
        return *gradient, None, None


class Faults:
    """Errors injected into chosen passes at chosen places of a model.

    Places are ``forward of MODULE`` and ``backward of MODULE`` at each module's output, and ``gradient of PARAMETER``
    just after a parameter's gradient was written. ``seen`` counts the passes of each since ``reset``.
    """

    def __init__(self, model: nn.Module, error: Callable[[], Exception] = out_of_memory) -> None:
        self.error = error
        self.seen: Counter[str] = Counter()
        self._fails: Callable[[str, int, int], bool] = lambda *_: False
        for name, module in model.named_modules():
            module.register_forward_hook(self._after_module(name or "the model"))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._after_gradient(name))  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Remove all faults, and reset the counts."""
        self.seen.clear()
        self._fails = lambda *_: False

    def fail(self, place: str, *passes: int) -> None:
        """Fail in these passes through ``place``, counted from 0."""
        self.reset()
        self._fails = lambda where, number, _: where == place and number in passes

    def fail_above(self, place: str, rows: int) -> None:
        """Fail whenever more than ``rows`` samples pass through ``place``, as real memory does."""
        self.reset()
        self._fails = lambda where, _, found: where == place and found > rows

    def record_pass(self, place: str, rows: int) -> None:
        """Count a pass at a place, and raise the error if the pass must fail."""
        number = self.seen[place]
        self.seen[place] += 1
        if self._fails(place, number, rows):
            raise self.error()

    def _after_module(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            passed: Tensor = _Point.apply(output, self, name)  # type: ignore[no-untyped-call]
            return passed

        return hook

    def _after_gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: self.record_pass(f"gradient of {name}", len(parameter))
