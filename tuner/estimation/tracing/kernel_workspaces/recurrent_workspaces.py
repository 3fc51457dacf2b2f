"""Memory that libraries keep for the backward pass of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_RECURRENT_BYTES = 62


def onednn_recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """Return the bytes that ``mkldnn_rnn_layer`` keeps for its backward pass, by the operator's arguments.

    oneDNN reports the size only at run time: 61 to 66 bytes for each hidden unit, step and sample, measured with LSTMs
    of 64 and 128 units over 64 to 128 steps.
    """
    steps, samples, _ = args[0].shape
    return int(steps * samples * args[10] * _RECURRENT_BYTES)
