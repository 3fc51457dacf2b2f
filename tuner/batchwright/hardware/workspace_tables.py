"""Find workspaces that were measured on a card of a compute capability, as shares of an operator's tensors. No torch.

`workspaces.json` has a table for each compute capability of which a card was measured: none so far. A host may name a
file with tables of its own, which take precedence. `benchmarks/workspace_table.py` makes both from a card's evidence.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import median

from batchwright.schemas.base import load_document
from batchwright.schemas.gpus import KernelProfile, WorkspaceFile, WorkspaceTable

FILE = Path(__file__).with_name("workspaces.json")
VARIABLE = "BATCHWRIGHT_WORKSPACES"
"""The environment variable with the path of a file of one's own."""
_STEP = Fraction(1, 16)
"""Expected shares are rounded up to multiples of it, so that most workspaces grow evenly with the micro-batch size."""
_LEAST_SPREAD = Fraction(1, 4)
"""An assumption: at shapes that were not measured, a share may differ by this much from the expected one at least."""


@dataclass(frozen=True)
class WorkspaceShare:
    """The workspace of a kind of operator, as a share of the bytes of its tensors."""

    low: Fraction
    expected: Fraction
    high: Fraction


class MeasuredWorkspaces:
    """The workspaces of one table."""

    def __init__(self, table: WorkspaceTable) -> None:
        self.table = table

    def share(self, kind: str) -> WorkspaceShare | None:
        """Return the share of a kind of operator; None for a kind that was not measured."""
        return self._shares.get(kind)

    @property
    def note(self) -> str:
        """The source of the workspaces, in words."""
        table = self.table
        card = f"{table.gpu} (a virtual card: they are invented)" if table.virtual else table.gpu
        return f"Workspaces of cuDNN are those of {card} with torch {table.torch} and cuDNN {table.cudnn}."

    @cached_property
    def _shares(self) -> dict[str, WorkspaceShare]:
        measured: dict[str, list[Fraction]] = {}
        for row in self.table.workspaces:
            measured.setdefault(row.kind, []).append(Fraction(row.workspace_bytes, row.operand_bytes))
        return {kind: _share(found) for kind, found in measured.items()}


def _share(found: list[Fraction]) -> WorkspaceShare:
    """Return the median of the measured shares, with the range of them all."""
    expected = -(-median(found) // _STEP) * _STEP
    return WorkspaceShare(
        low=max(Fraction(), min(*found, expected - _LEAST_SPREAD)),
        expected=expected,
        high=max(*found, expected + _LEAST_SPREAD),
    )


def measured_workspaces(
    profile: KernelProfile, environment: Mapping[str, str] = os.environ
) -> MeasuredWorkspaces | None:
    """Return the workspaces measured on a card of this compute capability; None where no card was measured.

    Raises:
        SpecError: when a file cannot be read, or does not have tables.
    """
    if not profile.has_cudnn:
        return None
    paths = [Path(environment[VARIABLE])] if environment.get(VARIABLE) else []
    for path in (*paths, FILE):
        for table in load_document(WorkspaceFile, path, "table of workspaces").tables:
            if table.compute_capability == profile.compute_capability:
                return MeasuredWorkspaces(table)
    return None
