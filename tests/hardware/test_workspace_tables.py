"""Measured workspaces: the shares that estimates read, and the files that tables come from."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import SpecError
from batchwright.hardware.workspace_tables import (
    FILE,
    VARIABLE,
    MeasuredWorkspaces,
    WorkspaceShare,
    measured_workspaces,
)
from batchwright.schemas.gpus import KernelProfile, MeasuredWorkspace, WorkspaceFile, WorkspaceTable

VOLTA = KernelProfile(compute_capability=(7, 0), kind="cuda")


def table(*rows: tuple[str, int, int], capability: tuple[int, int] = (7, 0), **fields: Any) -> WorkspaceTable:
    """A table that a test has made up: kinds, bytes of operands, bytes of workspaces."""
    workspaces = tuple(
        MeasuredWorkspace(kind=kind, shape="(8, 3, 4, 4)", operand_bytes=operands, workspace_bytes=nbytes)
        for kind, operands, nbytes in rows
    )
    origin = {"gpu": "A card", "date": "2026-01-31", "torch": "2.13.0", "cudnn": "92000", "driver": "580.65"}
    return WorkspaceTable(compute_capability=capability, workspaces=workspaces, **{**origin, **fields})


def written(path: Path, *tables: WorkspaceTable) -> Path:
    """A file with these tables."""
    path.write_text(WorkspaceFile(tables=tables).model_dump_json())
    return path


def test_a_share_is_the_median_within_the_range_of_all() -> None:
    """The expected share is rounded up to a sixteenth."""
    measured = MeasuredWorkspaces(table(("a", 100, 0), ("a", 100, 110), ("a", 100, 300), ("b", 100, 50)))
    share = measured.share("a")
    assert share == WorkspaceShare(Fraction(0), Fraction(18, 16), Fraction(3))
    assert measured.share("c") is None


def test_a_share_of_few_shapes_is_no_narrower_than_a_quarter() -> None:
    """Other shapes may differ, but no workspace is below zero."""
    measured = MeasuredWorkspaces(table(("a", 100, 100), ("none", 100, 0)))
    share, none = measured.share("a"), measured.share("none")
    assert share == WorkspaceShare(Fraction(3, 4), Fraction(1), Fraction(5, 4))
    assert none == WorkspaceShare(Fraction(0), Fraction(0), Fraction(1, 4))


def test_a_table_is_that_of_the_compute_capability(tmp_path: Path) -> None:
    """A table of another capability is not read, nor one of ROCm, which reports numbers of its own."""
    path = written(tmp_path / "own.json", table(capability=(7, 0)), table(capability=(7, 5), gpu="Another"))
    environment = {VARIABLE: str(path)}
    found = measured_workspaces(VOLTA, environment)
    assert found is not None
    assert found.table.gpu == "A card"
    assert measured_workspaces(KernelProfile(compute_capability=(7, 2), kind="cuda"), environment) is None
    assert measured_workspaces(KernelProfile(compute_capability=(7, 0), kind="rocm"), environment) is None


def test_the_tables_of_the_package_are_of_cards() -> None:
    """No shipped table is of a virtual card; without a file of the user's the shipped ones are all."""
    tables = WorkspaceFile.model_validate_json(FILE.read_text()).tables
    assert not any(each.virtual for each in tables)
    capabilities = {each.compute_capability for each in tables}
    assert (measured_workspaces(VOLTA, {}) is not None) is (VOLTA.compute_capability in capabilities)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{}", "tables"),
        (json.dumps({"tables": [json.loads(table().model_dump_json())] * 2}), "7.0 has more than one table"),
    ],
)
def test_a_file_without_tables_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    """The message names the file."""
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=r"own\.json") as caught:
        measured_workspaces(VOLTA, {VARIABLE: str(path)})
    assert message in str(caught.value)


def test_a_note_names_the_card_and_the_versions() -> None:
    """A virtual card is named as one."""
    assert MeasuredWorkspaces(table()).note == (
        "Workspaces of cuDNN are those of A card with torch 2.13.0 and cuDNN 92000."
    )
    assert "virtual card: they are invented" in MeasuredWorkspaces(table(virtual=True)).note
