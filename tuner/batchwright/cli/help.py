"""Help at 80 columns: no name is cut, and options are in groups."""

from dataclasses import fields
from typing import Any

from typer.core import TyperCommand, TyperGroup

from batchwright.cli.options import TrainingOptions
from batchwright.cli.trailing_command import CommandOptions, TakesCommand

_PARAMETERS = {
    "Arguments": {"spec", "recommendation"},
    "What to tune": {"effective_batch_size", "objective", "world_size", "baseline_plan"},
    "Device and memory": {"device", "gpu", "min_memory", "memory_limit", "memory_margin"},
    "Search": {
        "quick",
        "granularity",
        "max_micro_batch_size",
        "uniform",
        "uniform_only",
        "what_if",
        "warm_start_from",
        "allow_batch_coupling",
        "time_limit",
        "probe_timeout",
        "resume",
    },
    "The command after --": {each.name for each in fields(CommandOptions)},
    "Training": {each.name for each in fields(TrainingOptions)} - {"allow_batch_coupling"},
    "Names": {"name", "project", "label"},
    "Service": {"fresh", "priority", "watch", "url"},
    "Output": {"output", "output_dir", "json"},
}
"""The parameters of commands with many of them by their group in the help."""
_OTHERS = "Other options"


_LONGEST_SENTENCE = 300
"""Characters; the first sentence of a command's help is shorter."""


class GroupHelp(TyperGroup):
    """A group whose help has the whole first sentence of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own click, or click itself
        """Write the commands."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(_LONGEST_SENTENCE)) for name in names])


class GroupedHelp(TyperCommand):
    """A command with many options, which its help lists in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the options, a section for each group."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_PARAMETERS, _OTHERS)}
        for parameter in self.get_params(ctx):
            title = next((title for title, names in _PARAMETERS.items() if parameter.name in names), _OTHERS)
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class GroupedTakesCommand(GroupedHelp, TakesCommand):
    """A command with many options that takes another command after ``--``."""
