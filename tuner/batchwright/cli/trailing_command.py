"""The command after ``--`` on a command line: `batchwright tune [OPTIONS] -- COMMAND...`."""

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from batchwright.cli.arguments import wrong_argument

_KEY = "batchwright.cli.trailing_command"
_SEPARATOR = "--"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_FOR_SHELL = re.compile(r"[;<>|&$`\n]")
"""Characters of a quoted command that only a shell understands."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of the command after ``--``."""

    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="Environment variable of the command after `--`; may have placeholders. May be repeated.",
        ),
    ] = None
    template: Annotated[
        list[str] | None,
        typer.Option(
            "--template",
            metavar="NAME=FILE",
            help="Template of a configuration file: its placeholders are replaced, and `{file:NAME}` in the command is "
            "the path of the result. May be repeated.",
        ),
    ] = None
    working_directory: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder in which the command starts. Default: the current one."),
    ] = None
    probe_updates: Annotated[
        int | None, typer.Option(min=2, help="Optimizer updates after which a probe of the command ends. Default: 2.")
    ] = None
    probe_argument: Annotated[
        list[str] | None,
        typer.Option(
            "--probe-argument",
            metavar="ARGUMENT",
            help="Argument added to the command in probes only, such as its flag for the longest samples. May be "
            "repeated.",
        ),
    ] = None
    probe_env: Annotated[
        list[str] | None,
        typer.Option(
            "--probe-env",
            metavar="NAME=VALUE",
            help="Environment variable added in probes only, such as `WANDB_MODE=disabled`. May be repeated.",
        ),
    ] = None
    allow_overwriting: Annotated[
        bool,
        typer.Option(
            "--allow-overwriting",
            help="Continue if a probe of the command replaced or removed existing files.",
        ),
    ] = False
    samples_dimension: Annotated[
        int | None,
        typer.Option(min=0, help="Dimension of the model's input that counts samples: 1 if time comes first."),
    ] = None
    samples_per_unit: Annotated[
        int | None,
        typer.Option(min=1, help="Number of counted items per sample of the plan, such as 7 views of an image."),
    ] = None
    count_samples: Annotated[
        bool,
        typer.Option(
            "--count-samples/--no-count-samples",
            help="Compare the samples of an update with the plan, or only its backward passes.",
        ),
    ] = True
    longest_first: Annotated[
        bool,
        typer.Option(
            "--longest-first/--no-longest-first",
            help="Fill probe batches with the longest items of a data set, if that is safe (the default).",
        ),
    ] = True
    loading_timeout: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Seconds until the command's first forward pass; `--probe-timeout` counts from there."
        ),
    ] = None


class TakesCommand(TyperCommand):
    """A command of `batchwright` that takes another command after ``--``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments before the separator, and keep those after it for ``trailing_command``."""
        if _SEPARATOR in args:
            index = args.index(_SEPARATOR)
            ctx.meta[_KEY] = tuple(args[index + 1 :])
            args = args[:index]
        elif (begin := _begin_of_command(args)) is not None:
            own = {name for parameter in self.params for name in parameter.opts}
            words = list(takewhile(lambda word: word.partition("=")[0] not in own, args[begin:]))
            shown = words[0] if " " in words[0] else shlex.join(["python"] * words[0].endswith(".py") + words)
            message = f"comes after `--`, and options of batchwright before it: ... -- {shown}"
            raise wrong_argument("COMMAND", message, args[begin])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The pieces of the usage line, with the command at the end."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _begin_of_command(args: Sequence[str]) -> int | None:
    """Return where a command without ``--`` begins: at a script, or at a program with arguments or variables."""
    for index, word in enumerate(args):
        is_value = index > 0 and args[index - 1].startswith("-")
        if is_value or word.startswith("-") or not word.split():
            continue
        program, *arguments = word.split()
        has_arguments = bool(arguments) or index + 1 < len(args)
        is_program = shutil.which(program) is not None and not Path(word).is_file()  # a spec may be named like one
        if program.endswith(".py") or (is_program and has_arguments) or (_ASSIGNMENT.fullmatch(word) and has_arguments):
            return index
    return None


def own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments before a command after ``--``."""
    return arguments[: arguments.index(_SEPARATOR)] if _SEPARATOR in arguments else arguments


def trailing_command(context: typer.Context) -> tuple[str, ...] | None:
    """The command after ``--``; none where there is no separator."""
    return context.meta.get(_KEY)


def command_model(context: typer.Context, spec: Path | None, given: CommandOptions) -> dict[str, Any] | None:
    """The model of a spec as the options and the command after ``--`` describe it; none where a file describes it.

    Variables before the program, and a program that is quoted with its arguments, are read as a shell reads them.

    Raises:
        SpecError: when there is neither a file nor a command, both, an option for a command without one, or a quoted
            command that needs a shell.
    """
    command = trailing_command(context)
    if not command:
        values = {each.name: getattr(given, each.name) for each in fields(given)}
        changed = [each.name for each in fields(given) if values[each.name] not in (each.default, [], ())]
        names = [("--no-" if values[name] is False else "--") + name.replace("_", "-") for name in changed]
        _require_file_alone(spec, names)
        return None
    if spec is not None:
        raise wrong_argument("SPEC", "is given, and a command after `--` as well: give one of them", spec)
    variables, argv = _as_shell_reads(command)
    optional = {
        "working_directory": None if given.working_directory is None else str(given.working_directory),
        "probe_updates": given.probe_updates,
        "loading_timeout_seconds": given.loading_timeout,
        "probe_arguments": tuple(given.probe_argument or ()) or None,
        "samples_dimension": given.samples_dimension,
        "samples_per_unit": given.samples_per_unit,
        "counts_samples": given.count_samples,
        "longest_first": given.longest_first,
    }
    return {
        "kind": "command",
        "argv": argv,
        "environment": dict(_pair("--env", text) for text in given.env or ()) | variables,
        "probe_environment": dict(_pair("--probe-env", text) for text in given.probe_env or ()),
        "allow_overwriting": given.allow_overwriting,
        "files": {name: _template(path) for name, path in (_pair("--template", text) for text in given.template or ())},
        **{name: value for name, value in optional.items() if value is not None},
    }


def _as_shell_reads(command: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables before the program of a command, and its program and arguments."""
    words, variables = list(command), {}
    if len(command[0].split()) > 1 and not Path(command[0]).exists():
        words[:1] = _words_of(command[0])
    while len(words) > 1 and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found[1]] = found[2]
        del words[0]
    return variables, tuple(words)


def _words_of(quoted: str) -> list[str]:
    """The words of a command that was written in quotes, and needs no shell."""
    reason = "has characters for a shell" if _FOR_SHELL.search(quoted) else ""
    try:
        words = shlex.split(quoted)
    except ValueError as error:
        reason = str(error)
    if reason:
        remedy = f"write it without the outer quotes, or run it by a shell: `-- sh -c {shlex.quote(quoted)}`"
        raise wrong_argument("COMMAND", f"is one quoted word, and {reason}: {remedy}", quoted)
    return words


def _require_file_alone(spec: Path | None, given: Sequence[str]) -> None:
    if spec is None:
        raise wrong_argument(
            "SPEC", "is required: a file that describes the workload, or the command that trains after `--`", ""
        )
    if given:
        raise wrong_argument(given[0], "is for a command after `--`: write it into the spec's file", spec)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise wrong_argument(option, "must be a name, `=` and a value", text)
    return name, value


def _template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise wrong_argument("--template", f"cannot be read: {reason}", path) from None
