"""Precision: the parameters' type is set when a model is built; here are autocast and the loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tuner.schemas.workload import WorkloadSpec

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast(spec: WorkloadSpec, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: autocast for the mixed precisions."""
    dtype = _AUTOCAST.get(spec.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(spec: WorkloadSpec, device: torch.device) -> torch.amp.GradScaler:
    """Scales losses for fp16, whose gradients would underflow otherwise; passes everything through for the rest."""
    return torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16-mixed")
