"""Keep the linear layers of a frozen base in 4 or 8 bits, with the codes of ``bitsandbytes``.

The layer is ours, since those of the package keep their scales outside of parameters and buffers, where neither
checkpoints, digests nor traces see them, and that of 4 bits repacks its weight for evaluations on some CPUs. Codes,
scales and the products in 4 bits are the package's. Its products in 8 bits are not, for two reasons: on a card they
find columns of outliers in a whole micro-batch, so that a sample's loss depends on its neighbours, and they keep each
layer's input where activation checkpointing does not see it.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.model.adapter import BaseQuantization, LoraAdapter
from batchwright.workloads.adapters.lora import stacked_parameters

_BLOCK, _SCALES_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one of theirs: the defaults of bitsandbytes and of QLoRA."""
_CODES = 256
"""Values of a scale in 8 bits."""
_LARGEST_CODE = 127
"""Code of the largest weight of a row in 8 bits."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is in 4 or 8 bits.

    Args:
        linear: ``nn.Linear``, or ``Conv1D`` of transformers, whose weight is transposed.
        quantization: how to quantise.
        is_random: whether to make codes at random, which is fast and needs no values: for probes.
    """

    def __init__(self, linear: nn.Module, quantization: BaseQuantization, *, is_random: bool) -> None:
        nn.Module.__init__(self)  # that of the class would make a weight in full
        weight: Any = linear.weight if isinstance(linear, nn.Linear) else linear.weight.T
        self.out_features, self.in_features = weight.shape
        self.kind = quantization.kind
        self.absmax: Tensor
        scales = _random_scales if is_random else _quantized
        packed, kept = scales(weight.detach(), quantization)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.names = tuple(kept)
        for name, values in kept.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type] # a parameter, or None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return ``(..., out_features)`` from ``(..., in_features)``, in the type of autocast where that is on."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001 - see above
        bias = None if self.bias is None else self.bias.to(input.dtype)
        is_fused = bias is not None and not bias.requires_grad  # whose gradient the package sums over one dimension
        product = self._product(input, bias if is_fused else None)
        return product if bias is None or is_fused else product + bias

    def _product(self, data: Tensor, bias: Tensor | None) -> Tensor:
        if self.kind == "int8":
            product: Tensor = _Int8Product.apply(data, self.weight, self.absmax, bias)  # type: ignore[no-untyped-call]
        else:
            product = import_module("bitsandbytes").matmul_4bit(
                data, self.weight, quant_state=self._quant_state(data.dtype), bias=bias
            )
        return product

    def _quant_state(self, dtype: torch.dtype) -> Any:  # noqa: ANN401 - bitsandbytes' class
        state = import_module("bitsandbytes.functional").QuantState
        shape = torch.Size((self.out_features, self.in_features))
        kept = {name: getattr(self, name) for name in self.names}
        nested = None
        if "codes" in kept:
            nested = state(kept.pop("scales_absmax"), None, kept.pop("codes"), _SCALES_BLOCK, dtype=torch.float32)
        return state(kept["absmax"], shape, None, _BLOCK, self.kind, dtype, kept.get("offset"), nested)

    def extra_repr(self) -> str:
        """Return the sizes and the kind, for ``print``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class _Int8Product(torch.autograd.Function):
    """The product with a frozen weight in 8 bits, which is unpacked once more for the gradient of the input.

    The arithmetic is that of ``MatMul8bitFp`` of bitsandbytes 0.50.2, by which the package trains on the CPU. Nothing
    but the codes and the scales is kept for the backward pass, as the weight has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, data: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401 - torch's context
        ctx.save_for_backward(codes, absmax)
        return nn.functional.linear(data, _unpacked(codes, absmax, data.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 - see above
        (gradient,) = gradients
        codes, absmax = ctx.saved_tensors
        return gradient @ _unpacked(codes, absmax, gradient.dtype), None, None, None


def _unpacked(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of ``(out_features, in_features)`` from its codes and the largest magnitude of each row."""
    if codes.device.type == "cpu":  # on which torch makes copies in fp32 of its own, that no trace would see
        return codes.to(torch.float32).mul_(absmax.unsqueeze(1) / _LARGEST_CODE).to(dtype)
    return codes.to(dtype).mul_(absmax.unsqueeze(1) / _LARGEST_CODE)


def _quantized(weight: Tensor, quantization: BaseQuantization) -> tuple[Tensor, dict[str, Tensor]]:
    """The packed codes of a weight and their scales, by the card that the process uses, where it does."""
    on_card = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda") if on_card else weight.device
    functional = import_module("bitsandbytes.functional")
    if quantization.kind == "int8":
        codes, absmax, _ = functional.int8_vectorwise_quant(weight.to(device, torch.float16).contiguous())
        return codes.to(weight.device), {"absmax": absmax.to(weight.device)}
    packed, state = functional.quantize_4bit(
        weight.to(device).contiguous(),
        blocksize=_BLOCK,
        quant_type=quantization.kind,
        compress_statistics=quantization.double_quantization,
    )
    kept = {"absmax": state.absmax}
    if state.nested:
        kept |= {"offset": state.offset, "scales_absmax": state.state2.absmax, "codes": state.state2.code.clone()}
    return packed.to(weight.device), {name: values.to(weight.device) for name, values in kept.items()}


def _random_scales(weight: Tensor, quantization: BaseQuantization) -> tuple[Tensor, dict[str, Tensor]]:
    """Random codes and equal scales, in the shapes and types of ``_quantized``, on torch's default device."""
    if quantization.kind == "int8":
        codes = torch.randint(-_LARGEST_CODE, _LARGEST_CODE + 1, weight.shape, dtype=torch.int8)
        return codes, {"absmax": torch.full((weight.shape[0],), weight.shape[1] ** -0.5)}
    blocks = -(-weight.numel() // _BLOCK)
    packed = torch.randint(0, _CODES, (-(-weight.numel() // 2), 1), dtype=torch.uint8)
    scale = weight.shape[1] ** -0.5
    if not quantization.double_quantization:
        return packed, {"absmax": torch.full((blocks,), scale)}
    return packed, {
        "absmax": torch.zeros(blocks, dtype=torch.uint8),
        "offset": torch.tensor(scale),
        "scales_absmax": torch.zeros(-(-blocks // _SCALES_BLOCK)),
        "codes": torch.zeros(_CODES),
    }


def quantize_base(model: Any, adapter: LoraAdapter, *, is_random: bool) -> None:  # noqa: ANN401 - transformers' model
    """Replace the linear layers of a model by layers in 4 or 8 bits, in place, as transformers chooses them.

    The output layer, tied weights, modules that the model wants in fp32 and ``modules_to_save`` keep their weights.

    Args:
        model: a transformers model, frozen as a whole, without its adapter.
        adapter: the adapter with the quantisation.
        is_random: whether the weights are random ones, whose codes are made at random.

    Raises:
        SpecError: when the model has no such layer, or other weights that are multiplied like theirs.
    """
    if adapter.quantization is None:
        return
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - with the model
    from transformers.quantizers.base import get_keys_to_not_convert  # noqa: PLC0415 - as above

    whole = {*get_keys_to_not_convert(model), *adapter.modules_to_save, *(model._keep_in_fp32_modules or ())}  # noqa: SLF001 - as transformers' quantisers do

    def stays_whole(name: str) -> bool:
        return any(f".{other}." in f".{name}." for other in whole)  # these are names, or ends or parts of them

    stacked = [name for name in stacked_parameters(model) if not stays_whole(name)]
    if stacked:
        share = sum(model.get_parameter(name).numel() for name in stacked) / sum(map(torch.numel, model.parameters()))
        message = (
            f"cannot quantise {share:.0%} of the weights: {type(model).__name__} keeps them in stacks such as "
            f"`{stacked[0]}`, like the experts of a mixture, but transformers and bitsandbytes only quantise "
            "linear layers. Leave it out, or quantise the stacks in a `python` workload"
        )
        raise SpecError([FieldProblem("adapter.quantization", message)])
    found = [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and not stays_whole(name)
    ]
    if not found:
        message = f"finds no linear layer in {type(model).__name__}: leave it out"
        raise SpecError([FieldProblem("adapter.quantization", message)])
    for name in found:
        layer = QuantizedLinear(model.get_submodule(name), adapter.quantization, is_random=is_random)
        model.set_submodule(name, layer)


def unpacked_difference(model: nn.Module) -> int:
    """The number of quantised weights, less the numbers that hold them and their scales."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    held: list[Tensor] = [getattr(layer, name) for layer in layers for name in ("weight", *layer.names)]
    return sum(layer.in_features * layer.out_features for layer in layers) - sum(map(torch.numel, held))
