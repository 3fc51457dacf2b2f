"""Make a table of workspaces, which estimates read, of the evidence of a card: one JSON file of gpu_evidence.py.

python benchmarks/workspace_table.py EVIDENCE.json [--output tuner/batchwright/hardware/workspaces.json]

A row is a call of one operator whose workspace is the choice of a library (cuDNN), measured on the card. Other calls
are left out: torch's source says what they hold. The file keeps the tables of other compute capabilities, and the table
of this one is replaced. Evidence of a virtual card, whose workspaces are invented, is refused for the package's file.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reporting import new_parser

from batchwright.hardware.workspace_tables import FILE
from batchwright.schemas.base import load_document
from batchwright.schemas.gpus import MeasuredWorkspace, WorkspaceFile, WorkspaceTable
from batchwright.system.files import write_atomically

Row = dict[str, Any]


def table_of(evidence: Row) -> WorkspaceTable:
    """Return the table of a card's evidence.

    Raises:
        ValueError: when the evidence lacks the versions, or has no workspace of a library.
    """
    versions, rows = (evidence["parts"].get(name, {}).get("result", {}) for name in ("versions", "workspaces"))
    if not versions.get("torch_sees") or not versions.get("libraries"):
        raise ValueError("the evidence lacks the part `versions`")
    measured = list(rows.get("operators", ()))
    workspaces = tuple(_workspaces(measured))
    if not workspaces:
        raise ValueError("the evidence has no workspace of a library: run the part `workspaces`")
    capability = versions["torch_sees"]["compute_capability"]
    return WorkspaceTable(
        compute_capability=(capability[0], capability[1]),
        gpu=evidence["device"]["name"],
        virtual=evidence["virtual"],
        date=evidence["date"],
        torch=evidence["versions"]["torch"],
        cudnn=str(versions["libraries"]["cudnn"]),
        driver=evidence["device"]["driver_version"] or "unknown",
        blas_workspace_bytes=_blas_workspace_bytes(measured),
        workspaces=workspaces,
    )


def _workspaces(rows: list[Row]) -> Iterator[MeasuredWorkspace]:
    for row in rows:
        for direction in ("forward", "backward"):
            call = row.get(direction, {})
            found = call.get("library_calls", [])
            if len(found) == 1 == len(call["operators"]):  # no intermediate result of another operator is in the figure
                yield MeasuredWorkspace(
                    kind=found[0]["kind"],
                    shape=row["shape"],
                    operand_bytes=found[0]["operand_bytes"],
                    workspace_bytes=call["workspace_bytes"],
                )


def _blas_workspace_bytes(rows: list[Row]) -> int | None:
    """Return what the first matrix product left for good."""
    kept = [row["forward"]["persistent_bytes"] for row in rows if row.get("operator") == "mm"]
    return max(kept, default=0) or None


def merged(path: Path, table: WorkspaceTable) -> WorkspaceFile:
    """Return the content of a file with the table in the place of that of its compute capability.

    Raises:
        SpecError: when the file has no tables.
    """
    known = load_document(WorkspaceFile, path, "table of workspaces").tables if path.exists() else ()
    others = [other for other in known if other.compute_capability != table.compute_capability]
    return WorkspaceFile(tables=tuple(sorted((*others, table), key=lambda each: each.compute_capability)))


def main(arguments: list[str] | None = None) -> int:
    """Read, check, write."""
    parser = new_parser(__doc__)
    parser.add_argument("evidence", type=Path, help="the file that gpu_evidence.py has left")
    parser.add_argument("--output", type=Path, default=FILE, help="the file of tables; that of the package by default")
    options = parser.parse_args(arguments)
    evidence = json.loads(options.evidence.read_text(encoding="utf-8"))
    if evidence["virtual"] and options.output.resolve() == FILE.resolve():
        print(
            "the evidence is of a virtual card, whose workspaces are invented: name another --output", file=sys.stderr
        )
        return 1
    try:
        table = table_of(evidence)
    except ValueError as error:
        print(f"{options.evidence}: {error}", file=sys.stderr)
        return 1
    write_atomically(options.output, merged(options.output, table).model_dump_json(indent=1) + "\n")
    print(f"{len(table.workspaces)} workspaces of {table.gpu}: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
