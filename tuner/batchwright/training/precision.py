"""Autocast and the gradient scaler of a precision. The type of parameters is set when a model is built."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from batchwright.schemas.workload import WorkloadSpec

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast(spec: WorkloadSpec, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: autocast for the mixed precisions."""
    dtype = _AUTOCAST.get(spec.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(spec: WorkloadSpec, device: torch.device) -> torch.amp.GradScaler:
    """Gradient scaler for fp16, whose gradients would underflow otherwise; disabled for the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16-mixed")
