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
    if not traits_of(device.type).is_gpu:
        with _WithoutValues(device.type):
            return build_model(spec, workload, worst_case=True)
    # The mode comes last, to see calls before the default device is added.
    with tracer.without_recording(), device, _WithoutValues(device.type) as mode:
        model = build_model(spec, workload, worst_case=True)
        kept = _move_the_rest(model, device, tracer.fakes, mode.placed)
    _record_model(model, tracer)
    tracer.recorder.record(kept)
    return model


def _move_the_rest(
    model: nn.Module, device: torch.device, fakes: FakeTensorMode, placed: Mapping[int, Tensor]
) -> list[Tensor]:
    """Move parameters and buffers that are not fake tensors of this trace, as `nn.Module.to` does, and no others.

    `torch.Tensor(size)` makes its tensors on the CPU, whatever the default device is. A workload may also return a
    model that was made before the trace, or that an earlier trace has moved. Return the other tensors of modules that
    the workload has ``placed`` on the card.
    """
    kept: list[Tensor] = []
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
            kept += _leave_on_cpu(held, placed)
    return kept


def _leave_on_cpu(held: object, placed: Mapping[int, Tensor]) -> list[Tensor]:
    """Move the tensors of a list or mapping back from the default device of the trace: that of a run is the CPU.

    Tensors that the workload itself has ``placed`` on the card stay, and are returned.
    """
    kept: list[Tensor] = []
    entries = held.items() if type(held) is dict else enumerate(held) if type(held) is list else ()
    for key, value in list(entries):
        if not isinstance(value, FakeTensor) or isinstance(value, nn.Parameter):
            continue
        if id(value) in placed:
            kept.append(value)
        else:
            cast("Any", held)[key] = value.detach().to(device=_HOST)
    return kept


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
    """Skip the initialisation of parameters, and keep account of the tensors that a call itself puts on the card.

    A mode, and no patch of ``torch.nn.init``: a library that is imported meanwhile, as transformers is, would keep the
    patched functions and never initialise a model again.

    Args:
        device_type: that of the trace.

    Attributes:
        placed: the tensors that a call with this device made, and what was made of them, by their identity.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.placed: dict[int, Tensor] = {}
        self._device_type = device_type

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
        result = func(*args, **keywords)
        given = (*args, *keywords.values())
        is_placed = func is Tensor.cuda or any(self._names_card(each) or id(each) in self.placed for each in given)
        if is_placed and isinstance(result, FakeTensor) and not isinstance(result, nn.Parameter):
            self.placed[id(result)] = result
        return result

    def _names_card(self, value: object) -> bool:
        if isinstance(value, str):
            return value.partition(":")[0] == self._device_type
        return isinstance(value, torch.device) and value.type == self._device_type


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
