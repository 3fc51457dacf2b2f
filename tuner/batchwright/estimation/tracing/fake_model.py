"""Build a model of fake tensors: without values, hence without initialisation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from batchwright.device_traits import traits_of
from batchwright.estimation.tracing.dispatch_mode import Tracer
from batchwright.estimation.tracing.torch_internals import FakeTensor, FakeTensorMode
from batchwright.schemas.workload import WorkloadSpec
from batchwright.torch_internals import apply_to_all, own_buffers, own_parameters
from batchwright.workloads.base import Workload
from batchwright.workloads.build import build_model

_Value: TypeAlias = Any
"""An argument or a result of a torch function."""
_HOST = torch.device("cpu")
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module with what `nn.Module.to` moves."""
_INITIALISERS = frozenset({"constant_", "fill_", "kaiming_uniform_", "normal_", "uniform_", "zero_"})
"""Functions of ``torch.nn.init`` that a function mode sees, and the methods of tensors that the others call."""


def build_fake_model(spec: WorkloadSpec, workload: Workload, device: torch.device, tracer: Tracer) -> nn.Module:
    """Build the model on ``device``. As in a run, only its final tensors are recorded on a GPU."""
    with _WithoutValues():
        if not traits_of(device.type).is_gpu:
            return build_model(spec, workload, worst_case=True)
        with tracer.without_recording(), device:
            model = build_model(spec, workload, worst_case=True)
            _move_the_rest(model, device, tracer.fakes)
    _record_model(model, tracer)
    return model


def _move_the_rest(model: nn.Module, device: torch.device, fakes: FakeTensorMode) -> None:
    """Move parameters and buffers that are not fake tensors of this trace, as `nn.Module.to` does, and no others.

    `torch.Tensor(size)` makes its tensors on the CPU, whatever the default device is. A workload may also return a
    model that was made before the trace, or that an earlier trace has moved.
    """
    moved: dict[int, Tensor] = {}

    def on_device(tensor: Tensor) -> Tensor:
        if tensor.device == device and isinstance(tensor, FakeTensor) and tensor.fake_mode is fakes:
            return tensor
        if id(tensor) not in moved:
            values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad) if is_parameter else values
        return moved[id(tensor)]

    for module in model.modules():
        for tensors in (own_parameters(module), own_buffers(module)):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    setattr(module, name, on_device(tensor))
        attributes = vars(module)
        for held in (attributes, *(attributes[name] for name in attributes if name not in _REGISTERED)):
            _leave_on_cpu(held)


def _leave_on_cpu(held: object) -> None:
    """Move the tensors of a list or mapping back from the default device of the trace: that of a run is the CPU."""
    entries = held.items() if type(held) is dict else enumerate(held) if type(held) is list else ()
    for key, value in list(entries):
        if isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter):
            cast("Any", held)[key] = value.detach().to(device=_HOST)


def _record_model(module: nn.Module, tracer: Tracer) -> None:
    """Record parameters and buffers in the order in which ``nn.Module.to`` moves them."""
    for child in module.children():
        _record_model(child, tracer)
    for tensors in (own_parameters(module), own_buffers(module)):
        tracer.recorder.record([tensor for tensor in tensors.values() if tensor is not None])
    if isinstance(module, nn.RNNBase):
        _flatten_weights(module, tracer)


def _flatten_weights(layers: nn.RNNBase, tracer: Tracer) -> None:
    """Make the weights views of one buffer, as ``flatten_parameters`` does on a card: the first ones are freed."""
    weights = [weight for weight in own_parameters(layers).values() if weight is not None]
    if len({weight.dtype for weight in weights}) != 1:
        return
    with tracer.without_recording(), tracer.fakes:
        buffer = torch.empty(sum(map(torch.numel, weights)), dtype=weights[0].dtype, device=weights[0].device)
    tracer.recorder.record([buffer])
    offset = 0
    with torch.no_grad(), tracer.fakes:
        for weight in weights:
            weight.data = buffer.narrow(0, offset, weight.numel()).view(weight.shape)
            offset += weight.numel()


class _WithoutValues(TorchFunctionMode):
    """Skip the initialisation of parameters.

    A mode, and no patch of ``torch.nn.init``: a library that is imported meanwhile, as transformers is, would keep the
    patched functions and never initialise a model again.
    """

    def __torch_function__(
        self, func: _Value, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Value:
        del types
        keywords = dict(kwargs or {})
        if getattr(func, "__name__", "") in _INITIALISERS:
            tensor = args[0] if args else keywords.get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        if func is Tensor.cpu or (func is Tensor.to and args[1:] in {("cpu",), (_HOST,)}):
            return args[0]  # a run builds the model on the CPU
        return func(*args, **keywords)


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Replace ``Tensor.__deepcopy__``, which copies a storage. The copy is a leaf of its own.

    Peft trains a copy of each module in ``modules_to_save``, and a loss of several terms weighs copies of its batches.
    """
    copied: Tensor | None = memo.get(id(tensor))
    if copied is None:
        copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
    return copied


def apply_to_fakes(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - as torch calls it
    """Replace ``nn.Module._apply``, which cannot swap fake tensors."""
    for child in module.children() if recurse else ():
        apply_to_all(child, change)
    for parameter in own_parameters(module).values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = change(parameter)
    buffers = own_buffers(module)
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers[name] = change(buffer)
    return module
