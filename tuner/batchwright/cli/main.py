"""The command line: it assembles the commands and turns every error into a message and an exit code."""

import os
import re
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.main import get_group

from batchwright.cli.commands.devices import devices, gpus
from batchwright.cli.commands.estimate import estimate
from batchwright.cli.commands.export import export, formats
from batchwright.cli.commands.plan import plan
from batchwright.cli.commands.run import run
from batchwright.cli.commands.train import train
from batchwright.cli.commands.tune import tune
from batchwright.cli.commands.verify import verify
from batchwright.cli.errors import EndedBySignalError, ExitCode, exit_code
from batchwright.cli.help import GroupedTakesCommand, GroupHelp
from batchwright.cli.output import report
from batchwright.cli.trailing_command import own_arguments
from batchwright.errors import BatchwrightError, FieldProblem, SpecError
from batchwright.suggestions import suggestion
from batchwright.system.own_variables import possible_settings

_HELP = """Find the largest micro-batch that really fits, and the gradient accumulation that gives exactly the effective
batch you request.

Exit codes: 0 done; 2 wrong input (spec, numbers, files, settings, a limit above the device's memory); 3 no micro-batch
fits; 4 the tuning or the estimate failed (the workload's own error, a hang, a time limit before a plan was proven);
5 device not found, memory limit below the CUDA context, or the host is out of disk or processes; 6 the training failed;
129 the terminal was lost; 130 interrupted; 143 ended by SIGTERM; 1 an internal error of Batchwright.
"""

_EXTRAS = {
    "pynvml": "torch",
    "torch": "torch",
    "fastapi": "service",
    "uvicorn": "service",
    "sqlalchemy": "service",
    "prometheus_client": "service",
    "pydantic_settings": "service",
    "psycopg": "postgres",
}
"""Extra that installs a package which a command may need, by package."""

_ENTRY_POINTS = "batchwright.commands"
"""Group of the entry points whose functions and groups are commands too."""
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
"""typer's own class of errors about arguments, or that of click, which typer does not export."""
_NOT_A_CHOICE = re.compile(r"'(.*)' is not one of ([^()]*)\.")
_SETTINGS = "batchwright.settings"
"""Group of the entry points that return the problems of an environment's variables with the project's prefix."""


class _Commands(GroupHelp):
    """The commands of the library, and those of entry points.

    The latter are imported only for one of them, and for the list of all: those of the service take a quarter of the
    imports of a tuning.
    """

    _has_all = False

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as below
        """Run a command; Ctrl-C ends it with the exit code of an interrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise EndedBySignalError("Interrupted", ExitCode.INTERRUPTED) from None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - typer's own click, or click itself
        """Return the command of a name; None for an unknown name."""
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - as above
        """Return the names of all commands."""
        self._load()
        return super().list_commands(ctx)

    def _load(self) -> None:
        """Import the commands of entry points."""
        if self._has_all:
            return
        self._has_all = True
        others = _typer()
        for found in sorted(metadata.entry_points(group=_ENTRY_POINTS), key=lambda entry: entry.name):
            command = found.load()
            if isinstance(command, typer.Typer):
                others.add_typer(command, name=found.name)
            else:
                others.command(name=found.name)(command)
        self.commands.update(get_group(others).commands)


def _typer() -> typer.Typer:
    return typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut the names of options at 80 columns
    )


app = _typer()
_COMMANDS = (tune, verify, estimate, gpus, plan, train, run, devices, export, formats)
"""Commands of the library, in the order of ``--help``."""
_TAKE_COMMANDS = (tune, verify, run)
"""Commands that take a training command after ``--``."""


def _print_version(requested: bool) -> None:  # noqa: FBT001 - the value of an option
    if requested:
        sys.stdout.write(f"batchwright {metadata.version('batchwright')}\n")
        raise typer.Exit


@app.callback(help=_HELP)
def _batchwright(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback
    if not {"--help", "-h"} & set(own_arguments(sys.argv)):
        _require_known_variables()


def _require_known_variables() -> None:
    """Refuse misspelt variables. Without a service's packages, its settings are not known, and nothing is refused."""
    if not possible_settings(os.environ):
        return
    for found in metadata.entry_points(group=_SETTINGS):
        try:
            problems = found.load()(os.environ)
        except ModuleNotFoundError:
            continue
        if problems:
            raise SpecError(problems, "environment")


for _command in _COMMANDS:
    app.command(cls=GroupedTakesCommand if _command in _TAKE_COMMANDS else None)(_command)


def main() -> None:
    """Run the command line, and end with a message and a documented exit code after every error."""
    as_document = "--json" in own_arguments(sys.argv)
    try:
        sys.exit(app(standalone_mode=False))
    except BatchwrightError as error:
        report(error, as_document=as_document)
        sys.exit(exit_code(error))
    except _USAGE_ERROR as error:
        if found := _NOT_A_CHOICE.fullmatch(error.message):
            hint = suggestion(found[1], [name.strip("' ") for name in found[2].split(",")])
            error.message = f"'{found[1]}' is not one of {found[2]}{hint or '.'}"
        if as_document:
            report(error, as_document=True)
        else:
            error.show()
        sys.exit(ExitCode.WRONG_INPUT)
    except Exception as error:
        extra = _EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        if isinstance(error, ModuleNotFoundError) and extra is not None:
            message = f"this command needs `{error.name}`: pip install 'batchwright[{extra}]'"
            report(SpecError([FieldProblem("", message)], "installation"), as_document=as_document)
            sys.exit(ExitCode.WRONG_INPUT)
        if as_document:
            report(error, as_document=True)
        raise
