"""Find the batch norms with which a process trains. Their statistics are those of a micro-batch."""

from __future__ import annotations

import gc
from typing import Any


def trains_batch_norms(torch: Any) -> bool:
    """Return whether a batch norm of this process has normalised by the statistics of a batch, and would again.

    All objects are looked at once, because a hook on every module or on `torch.nn.functional.batch_norm` would slow the
    program down, or break its compiled graphs. A synchronised batch norm counts too: it has the statistics of all
    ranks, but of one micro-batch.

    Args:
        torch: the module.
    """
    kind = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - the base of all of them, which has no public name
    return any(_uses_batch(found) for found in gc.get_objects() if issubclass(type(found), kind))


def _uses_batch(module: Any) -> bool:
    """Return whether a module normalises by the batch, and has run, as far as it counts its batches."""
    if not module.training and module.running_mean is not None:
        return False
    batches = module.num_batches_tracked
    return batches is None or (not batches.is_meta and int(batches) > 0)
