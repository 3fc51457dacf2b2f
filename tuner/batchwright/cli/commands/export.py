"""``batchwright export`` and ``batchwright formats``."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from batchwright.cli import options
from batchwright.cli.arguments import check_folder, unwritable, wrong_argument
from batchwright.cli.display import plain_console
from batchwright.errors import FieldProblem, SpecError
from batchwright.exports.base import Export, ExportedFile, ExportFormat, ExportOptions
from batchwright.exports.registry import TARGETS, export as make_export
from batchwright.exports.rendering import one_line
from batchwright.schemas.base import load_document
from batchwright.schemas.field_errors import problems_in
from batchwright.schemas.recommendation import Recommendation
from batchwright.system.files import write_atomically
from batchwright.units import counted

_DEFAULTS = ExportOptions()


def _help_of(name: str) -> str:
    return " ".join((ExportOptions.model_fields[name].description or "").split())


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """The options of an export."""

    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="NAME", help="Export format; `batchwright formats` lists all.")
    ]
    target_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Version of the format; default: the newest.")
    ] = None
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help=_help_of("allow_inexact"))] = False
    script: Annotated[str, typer.Option(help=_help_of("script"))] = _DEFAULTS.script
    arguments_of: Annotated[str | None, typer.Option(metavar="NAME", help=_help_of("arguments_of"))] = None
    job_name: Annotated[str, typer.Option(help=_help_of("job_name"))] = _DEFAULTS.job_name
    processes_per_node: Annotated[int | None, typer.Option(help=_help_of("processes_per_node"))] = None
    image: Annotated[str, typer.Option(help=_help_of("image"))] = _DEFAULTS.image
    updates: Annotated[int | None, typer.Option(help=_help_of("updates"))] = None
    queue: Annotated[str | None, typer.Option(help=_help_of("queue"))] = None
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Write the files into this folder, not to the terminal.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False


@options.with_groups
def export(
    recommendation: Annotated[Path, typer.Argument(metavar="REC", help="The recommendation of `tune`, as JSON.")],
    *,
    given: FormatOptions,
    json: options.Json = False,
) -> None:
    """Export a recommendation to files of a framework or launcher.

    Prints the first file on standard output, and a summary with warnings on standard error.

    Example: batchwright export recommendation.json --format slurm --queue gpu --script pretrain.py > job.sbatch
    """

    def make(of: ExportOptions) -> Export:
        found = load_document(Recommendation, recommendation, "recommendation")
        made = make_export(found, given.format_, version=given.target_version, options=of)
        verification = made.verification.replace("recommendation.json", shlex.quote(str(recommendation)))
        return made.model_copy(update={"verification": verification})

    print_export(given, make, as_document=json)


def print_export(given: FormatOptions, make: Callable[[ExportOptions], Export], *, as_document: bool) -> None:
    """Make an export from the options, and print or write it."""
    if given.output_dir is not None:
        check_folder(given.output_dir, "--output-dir")
    made = make(_options(**{name: value for name, value in vars(given).items() if name in ExportOptions.model_fields}))
    written = () if given.output_dir is None else _write(made.files, given.output_dir, force=given.force)
    if as_document:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
        return
    if given.output_dir is None:
        sys.stdout.write(made.files[0].content)
    plain_console(stderr=True).print(export_summary(made, written), crop=False)


def formats(*, json: options.Json = False) -> None:
    """List the formats of `export`; with --json also how each is verified."""
    listed = [target.described() for target in TARGETS.values()]
    if json:
        sys.stdout.writelines(item.model_dump_json() + "\n" for item in listed)
    else:
        plain_console().print(format_table(listed))


def format_table(listed: list[ExportFormat]) -> Table:
    """Build the table of formats."""
    table = Table(Column("format", no_wrap=True), "target", "kind", "versions", box=None)
    for item in listed:
        table.add_row(item.format, item.title, item.kind, ", ".join(item.versions))
    return table


def export_summary(made: Export, written: tuple[Path, ...] = ()) -> RenderableType:
    """Build the summary of an export: plan, environment, warnings and files."""
    plan = made.plan
    steps = f"{counted(plan.gradient_accumulation_steps, 'step')} of at most {plan.micro_batch_size}"
    target = f"{made.title} {made.target_version}"
    lines = [f"{target}: {plan.effective_batch_size} samples per update, {counted(plan.world_size, 'rank')}, {steps}"]
    if not plan.exact:
        lines.append(f"NOT EXACT: {plan.requested_effective_batch_size} were requested")
    lines += [
        f"set in the environment: {shlex.quote(f'{name}={value}')}"
        for name, value in made.environment.items()
        if not any(name in file.content for file in made.files)
    ]
    lines += [f"warning: {item.message}" for item in made.warnings]
    lines.append(made.verification)
    lines += [f"wrote {path}" for path in written]
    if not written and len(made.files) > 1:
        others = ", ".join(file.name for file in made.files[1:])
        lines.append(f"not printed: {others}; --output-dir writes all")
    # A command to copy stays on one line.
    return Group(*(Text(one_line(line), overflow="ignore" if line == made.verification else None) for line in lines))


def _options(**fields: object) -> ExportOptions:
    try:
        return ExportOptions.model_validate(fields)
    except ValidationError as error:
        problems = problems_in(error, fields, ExportOptions)
        named = [
            FieldProblem("--" + problem.field.replace("_", "-"), problem.message, problem.value) for problem in problems
        ]
        raise SpecError(named, "arguments") from None


def _write(files: tuple[ExportedFile, ...], folder: Path, *, force: bool) -> tuple[Path, ...]:
    paths = tuple(folder / file.name for file in files)
    if not force:
        existing = [str(path) for path in paths if path.exists()]
        if existing:
            raise wrong_argument("--output-dir", f"{', '.join(existing)} exists already; --force overwrites", folder)
    for path, file in zip(paths, files, strict=True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, file.content)
        except OSError as error:
            raise wrong_argument("--output-dir", unwritable(path, error), folder) from None
    return paths
