"""Print results on standard output, as JSON or as text, and errors on standard error."""

from __future__ import annotations

import sys

from pydantic import BaseModel
from rich.console import Console


def print_result(document: BaseModel, *, as_document: bool, text: object) -> None:
    """Print a result on standard output, as JSON or as text."""
    if as_document:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        Console(highlight=False, markup=False).print(text)


def print_error(text: str) -> None:
    """Print an error as text on standard error."""
    from rich.markup import escape  # noqa: PLC0415 - only on the way out

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error[/]: {escape(text)}")
