"""Print results on standard output, as JSON or as text, and errors on standard error."""

from __future__ import annotations

import sys

import typer
from pydantic import BaseModel
from rich.console import Console

from batchwright.cli.errors import ExitCode
from batchwright.schemas.training import RunOutcome, TrainingResult


def print_result(document: BaseModel, *, as_document: bool, text: object) -> None:
    """Print a result on standard output, as JSON or as text."""
    if as_document:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        Console(highlight=False, markup=False).print(text)


def print_run(result: TrainingResult, *, as_document: bool, text: str, stopped: ExitCode) -> None:
    """Print the result of a run, and exit with a code unless it succeeded: if it was stopped, with ``stopped``."""
    print_result(result, as_document=as_document, text=text)
    if result.outcome is not RunOutcome.SUCCEEDED:
        raise typer.Exit(ExitCode.TRAINING_FAILED if result.outcome is RunOutcome.FAILED else stopped)


def print_error(text: str) -> None:
    """Print an error as text on standard error."""
    from rich.markup import escape  # noqa: PLC0415 - only on the way out

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error[/]: {escape(text)}")
