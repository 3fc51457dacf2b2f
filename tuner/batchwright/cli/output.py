"""Print results on standard output, as JSON or as text, and errors on standard error."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from batchwright.cli.arguments import target_of, unwritable, wrong_argument
from batchwright.cli.display import plain_console
from batchwright.cli.errors import EndedBySignalError, ExitCode, as_json
from batchwright.errors import SpecError
from batchwright.schemas.base import Document
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright.system.files import write_atomically


def print_result(document: BaseModel, *, as_document: bool, text: object) -> None:
    """Print a result on standard output, as JSON or as text."""
    if as_document:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        plain_console().print(text)


def print_rows(found: Sequence[Document], table: Table, *, json: bool) -> None:
    """Print rows as JSON Lines, or as the table."""
    if json:
        sys.stdout.writelines(row.model_dump_json() + "\n" for row in found)
    else:
        plain_console().print(table)


def print_run(result: TrainingResult, *, as_document: bool, text: str, stopped: ExitCode) -> None:
    """Print the result of a run, and exit with a code unless it succeeded: if it was stopped, with ``stopped``."""
    print_result(result, as_document=as_document, text=text)
    if result.outcome is not RunOutcome.SUCCEEDED:
        raise typer.Exit(ExitCode.TRAINING_FAILED if result.outcome is RunOutcome.FAILED else stopped)


def write_output(path: Path, document: BaseModel, *, as_document: bool) -> None:
    """Write a result that was printed to the file of ``--output``, and exit with an error if that is not possible."""
    try:
        write_atomically(target_of(path), document.model_dump_json(indent=2))
    except OSError as error:
        message = f"{unwritable(path, error)}; the result is on standard output"
        report(wrong_argument("--output", message, ""), as_document=as_document, beside_result=True)
        raise typer.Exit(ExitCode.WRONG_INPUT) from None


def report(error: BaseException, *, as_document: bool, beside_result: bool = False) -> None:
    """Print an error with its notes: as text on standard error, or as JSON on standard output.

    JSON is on standard error too if standard output already has a result (``beside_result``).
    """
    if as_document:
        (sys.stderr if beside_result else sys.stdout).write(as_json(error) + "\n")
        return
    kind = Text() if isinstance(error, EndedBySignalError) else Text.assemble(("error", "red"), ": ")
    message = str(error)
    if isinstance(error, SpecError) and error.document == "arguments" and len(error.problems) == 1:
        message = str(error.problems[0])
    text = "\n".join([message, *getattr(error, "__notes__", [])])
    plain_console(stderr=True).print(kind + Text(text), soft_wrap=True)
