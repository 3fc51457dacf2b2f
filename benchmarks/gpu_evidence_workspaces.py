"""Workspaces of operators on a card, by operator and shape: measured, and as estimates assume them.

gpu_evidence_parts.py runs this. A workspace is what a call holds beside what it leaves. It is measured as the peak of
the allocated bytes during the call less the bytes allocated after it, from the second call on, when handles and
persistent workspaces exist. What the first call leaves beyond the second is persistent (cuBLAS keeps one workspace
for each handle and stream). Where a call runs several operators, which are listed, its workspace has their
intermediate results too; traces count these by themselves, so that `assumed_bytes` is only of the workspaces inside
of operators. `library_calls` names the operators whose workspaces are the choice of a library, with the bytes of their
tensors: workspace_table.py makes a table of them that estimates read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from batchwright.estimation.tracing.kernel_workspaces.device_kernels import CudaKernels
from batchwright.estimation.tracing.kernel_workspaces.library_calls import library_call
from batchwright.estimation.tracing.torch_internals import OpOverload
from batchwright.schemas.gpus import KernelProfile
from batchwright.torch_internals import TorchDispatchMode

Call = Callable[[], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Operator:
    """An operator at one shape: a forward call, and the tensors whose gradients its backward call makes."""

    name: str
    shape: str
    forward: Call
    inputs: tuple[Tensor, ...] = field(repr=False)


class _Assumed(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's types
    """Collects the workspaces that estimates assume for the operators of a call."""

    def __init__(self, kernels: CudaKernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._kernels = kernels
        self.temporary_bytes = 0
        self.operators: list[str] = []
        self.library_calls: list[Row] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - an operator's results
        """Run the operator, and keep the largest sum of the workspaces of one."""
        del types
        found = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        held = sum(
            part if isinstance(part, int) else part.nbytes for part in self._kernels.temporary(func, args, outputs)
        )
        self.temporary_bytes = max(self.temporary_bytes, held)
        self.operators += [] if func.is_view else [str(func)]
        if found_call := library_call(func, args, outputs):
            self.library_calls.append({"kind": found_call.kind, "operand_bytes": found_call.operand_bytes})
        return found


def measure(device: torch.device) -> Iterator[Row]:
    """Yield the workspaces of each operator, of the forward and of the backward call."""
    profile = KernelProfile(compute_capability=torch.cuda.get_device_capability(device), kind="cuda")
    kernels = CudaKernels(profile)
    for make in (_matrix_products, _convolutions, _attentions, _others, _recurrent):
        try:
            for operator in make(device):
                yield _row(operator, kernels)
                torch.cuda.empty_cache()
        except (RuntimeError, NotImplementedError) as error:  # a card may lack a kernel for a type
            yield {"operator": make.__name__.strip("_"), "failed": f"{type(error).__name__}: {error}"}


def _row(operator: Operator, kernels: CudaKernels) -> Row:
    forward = _measured(operator.forward, kernels)
    loss = operator.forward()
    gradient = torch.ones_like(loss)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, operator.inputs, gradient, retain_graph=True)

    return {
        "operator": operator.name,
        "shape": operator.shape,
        "forward": forward,
        "backward": _measured(backward, kernels),
    }


def _measured(call: Call, kernels: CudaKernels) -> Row:
    """Call three times: for what persists, for the workspace, and for what an estimate assumes."""
    first_left, _ = _left_and_beside(call)
    left, beside = _left_and_beside(call)
    with _Assumed(kernels) as assumed:
        call()
    return {
        "left_bytes": left,
        "persistent_bytes": max(0, first_left - left),
        "workspace_bytes": beside,
        "assumed_bytes": assumed.temporary_bytes,
        "operators": assumed.operators,
        "library_calls": assumed.library_calls,
    }


def _left_and_beside(call: Call) -> tuple[int, int]:
    """Return the bytes that a call leaves allocated, and the most that it held beside these."""
    _let_go()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    left, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del found
    return left - before, peak - left


def _let_go() -> None:
    """Have the thread of backward passes let go of the last one's results, which it holds until the next one."""
    torch.autograd.backward(torch.zeros(1, device="cuda", requires_grad=True).sum())


def _parameter(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def _words(dtype: torch.dtype, *parts: object) -> str:
    return " ".join([str(dtype).removeprefix("torch."), *map(str, parts)])


def _matrix_products(device: torch.device) -> Iterator[Operator]:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, inner, columns in ((512, 512, 512), (8192, 768, 3072), (4096, 4096, 4096)):
            left, right = _parameter(device, dtype, rows, inner), _parameter(device, dtype, inner, columns)
            shape = _words(dtype, f"({rows}, {inner}) x ({inner}, {columns})")
            yield Operator("mm", shape, partial(torch.mm, left, right), (left, right))


def _convolutions(device: torch.device) -> Iterator[Operator]:
    shapes = (
        (32, 64, 56, 64, 3, 1, 1),
        (32, 3, 224, 64, 7, 2, 1),
        (16, 256, 28, 512, 1, 1, 1),
        (8, 512, 14, 512, 3, 1, 1),
        (16, 256, 28, 256, 7, 1, 256),
    )
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            for samples, channels, side, filters, kernel, stride, groups in shapes:
                images = torch.randn(samples, channels, side, side, device=device, dtype=dtype)
                images = images.contiguous(memory_format=layout).requires_grad_()
                weight = torch.randn(filters, channels // groups, kernel, kernel, device=device, dtype=dtype)
                weight = weight.contiguous(memory_format=layout).requires_grad_()
                sizes = f"({samples}, {channels}, {side}, {side}), {filters} filters {kernel}x{kernel}, stride {stride}"
                sizes += f", {groups} groups" if groups > 1 else ""
                yield Operator(
                    "conv2d",
                    _words(dtype, sizes, str(layout).removeprefix("torch.")),
                    partial(functional.conv2d, images, weight, stride=stride, padding=kernel // 2, groups=groups),
                    (images, weight),
                )


def _attentions(device: torch.device) -> Iterator[Operator]:
    for dtype in (torch.float32, torch.bfloat16):
        for samples, heads, length, width in ((8, 12, 1024, 64), (2, 16, 2048, 128), (8, 8, 512, 96)):
            for causal in (True, False):
                query, key, value = (_parameter(device, dtype, samples, heads, length, width) for _ in range(3))
                shape = _words(dtype, f"({samples}, {heads}, {length}, {width})", "causal" if causal else "full")
                yield Operator(
                    "scaled_dot_product_attention",
                    shape,
                    partial(functional.scaled_dot_product_attention, query, key, value, is_causal=causal),
                    (query, key, value),
                )


def _recurrent(device: torch.device) -> Iterator[Operator]:
    for dtype in (torch.float32, torch.bfloat16):
        for samples, length, width, layers in ((32, 128, 256, 1), (64, 256, 512, 2)):
            network = nn.LSTM(width, width, layers, batch_first=True).to(device, dtype)
            inputs = _parameter(device, dtype, samples, length, width)
            yield Operator(
                "lstm",
                _words(dtype, f"({samples}, {length}, {width})", f"{layers} layers"),
                partial(_outputs, network, inputs),
                (inputs, *network.parameters()),
            )


def _outputs(network: nn.LSTM, inputs: Tensor) -> Tensor:
    outputs: Tensor = network(inputs)[0]
    return outputs


def _others(device: torch.device) -> Iterator[Operator]:
    ids = torch.randint(0, 50_000, (8, 1024), device=device)
    weight = _parameter(device, torch.float32, 50_257, 768)
    yield Operator(
        "embedding", "float32 (8, 1024) of (50257, 768)", lambda: functional.embedding(ids, weight), (weight,)
    )
    logits, labels = _parameter(device, torch.float32, 4096, 50_257), torch.randint(0, 50_257, (4096,), device=device)
    yield Operator(
        "cross_entropy",
        "float32 (4096, 50257)",
        lambda: functional.cross_entropy(logits, labels, reduction="sum"),
        (logits,),
    )
    hidden = _parameter(device, torch.bfloat16, 8192, 768)
    yield Operator("layer_norm", "bfloat16 (8192, 768)", lambda: functional.layer_norm(hidden, (768,)), (hidden,))
