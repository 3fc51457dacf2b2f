"""The command after ``--`` on a command line: `batchwright tune [OPTIONS] -- COMMAND...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from batchwright.cli.arguments import wrong_argument

_KEY = "batchwright.cli.trailing_command"
_SEPARATOR = "--"

Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME=VALUE",
        help="Environment variable of the command after `--`, which may have placeholders. May be repeated.",
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="NAME=FILE",
        help="Template of a configuration file: its placeholders are replaced, and `{file:NAME}` in the command is "
        "the path of the result. May be repeated.",
    ),
]
WorkingDirectory = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder in which the command starts. Default: the current one.")
]
ProbeUpdates = Annotated[
    int | None, typer.Option(min=2, help="Optimizer updates after which a probe of the command ends. Default: 2.")
]
ProbeArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--probe-argument",
        metavar="ARGUMENT",
        help="Argument that probes add to the command and jobs do not, such as its flag for the longest samples. May "
        "be repeated.",
    ),
]
SamplesDimension = Annotated[
    int | None,
    typer.Option(min=0, help="Dimension of what the model is called with that counts samples: 1 where time is first."),
]
SamplesPerUnit = Annotated[
    int | None, typer.Option(min=1, help="What is counted for each sample of the plan, such as 7 views of an image.")
]
CountSamples = Annotated[
    bool,
    typer.Option(
        "--count-samples/--no-count-samples",
        help="Compare the samples of an update with the plan, or its backward passes alone.",
    ),
]
LoadingTimeout = Annotated[
    float | None,
    typer.Option(min=1.0, help="Seconds until the command's first forward pass; `--probe-timeout` counts from there."),
]
UniformOnly = Annotated[
    bool | None,
    typer.Option(
        "--uniform-only/--no-uniform-only",
        help="Of a command, search only sizes that divide a rank's samples, as its plan repeats one size (the "
        "default), or any size.",
    ),
]


class TakesCommand(TyperCommand):
    """A command of `batchwright` that takes another command after ``--``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments before the separator, and keep those after it for ``trailing_command``."""
        if _SEPARATOR in args:
            index = args.index(_SEPARATOR)
            ctx.meta[_KEY] = tuple(args[index + 1 :])
            args = args[:index]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The pieces of the usage line, with the command at the end."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments before a command after ``--``."""
    return arguments[: arguments.index(_SEPARATOR)] if _SEPARATOR in arguments else arguments


def trailing_command(context: typer.Context) -> tuple[str, ...] | None:
    """The command after ``--``; none where there is no separator."""
    return context.meta.get(_KEY)


def command_model(  # noqa: PLR0913 - the options of a command
    context: typer.Context,
    spec: Path | None,
    *,
    environment: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    working_directory: Path | None = None,
    probe_updates: int | None = None,
    probe_arguments: Sequence[str] | None = None,
    samples_dimension: int | None = None,
    samples_per_unit: int | None = None,
    count_samples: bool = True,
    loading_timeout: float | None = None,
) -> dict[str, Any] | None:
    """The model of a spec as the options and the command after ``--`` describe it; none where a file describes it.

    Raises:
        SpecError: when there is neither a file nor a command, both, or an option for a command without one.
    """
    command = trailing_command(context)
    options = {
        "--env": environment,
        "--template": templates,
        "--working-directory": working_directory,
        "--probe-updates": probe_updates,
        "--probe-argument": probe_arguments,
        "--samples-dimension": samples_dimension is not None,
        "--samples-per-unit": samples_per_unit,
        "--no-count-samples": not count_samples,
        "--loading-timeout": loading_timeout,
    }
    if not command:
        _require_file_alone(spec, [name for name, value in options.items() if value])
        return None
    if spec is not None:
        raise wrong_argument("SPEC", "is given, and a command after `--` as well: give one of them", spec)
    fields = {
        "working_directory": None if working_directory is None else str(working_directory),
        "probe_updates": probe_updates,
        "samples_dimension": samples_dimension,
        "samples_per_unit": samples_per_unit,
        "counts_samples": count_samples,
        "loading_timeout_seconds": loading_timeout,
        "probe_arguments": tuple(probe_arguments or ()) or None,
    }
    return {
        "kind": "command",
        "argv": command,
        "environment": dict(_pair("--env", text) for text in environment or ()),
        "files": {name: _template(path) for name, path in (_pair("--template", text) for text in templates or ())},
        **{name: value for name, value in fields.items() if value is not None},
    }


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
