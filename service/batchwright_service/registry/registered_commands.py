"""Read the operator's file of commands, and turn the name of a command with arguments into a spec that is run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from batchwright.client.documents.commands import CommandList, RegisteredCommand
from batchwright.client.documents.problems import FieldFault
from batchwright.commands.templates import check_command, contents_of_files
from batchwright.errors import FieldProblem, SpecError
from batchwright.planning.fingerprint import canonical_json
from batchwright.schemas.base import parse_document, read_data
from batchwright.schemas.command import FILE_PREFIX, CommandModel, CommandSpec, placeholders_in
from batchwright.schemas.workload import RanksSpec
from batchwright.suggestions import suggestion
from batchwright.system.data_roots import DataRoots
from batchwright_service.errors import CommandNotAllowedError, DataPathNotAllowedError, InvalidInputError, RequestError
from batchwright_service.registry.argument_schema import schema_of
from batchwright_service.registry.argument_values import Value, checked_values
from batchwright_service.registry.definitions import BooleanArgument, CommandDefinition, CommandsFile
from batchwright_service.registry.placement import arguments_in

_OF_CALLERS = {"kind", "name", "arguments", "definition"}
"""Fields of a command that do not come from its registration."""
_TAKEN_AS_REGISTERED = (CommandModel.model_fields.keys() & CommandDefinition.model_fields.keys()) - {
    *("argv", "arguments", "environment", "files", "working_directory")
}
"""Fields of a command that do not depend on the values of a caller."""
_REMEDY = (
    "name a command that the operator has registered (`GET /v1/commands`; BATCHWRIGHT_COMMANDS), or tune yours with "
    "`batchwright tune ... -- COMMAND` on the host that trains"
)


class RegisteredCommands:
    """The commands of a service. Read once, at its start: a changed file counts from the next start.

    Args:
        definitions: the commands by name.
        folder: the folder of the file, which relative working directories start from.
        data_roots: folders that `path` arguments may name where a command has none of its own.
    """

    def __init__(
        self, definitions: Mapping[str, CommandDefinition], folder: Path, data_roots: Sequence[str] = ()
    ) -> None:
        self._file: Path | None = None
        self._read = ""
        self._definitions = dict(definitions)
        self._folder = folder
        self._roots = {
            name: DataRoots(data_roots if definition.data_roots is None else definition.data_roots)
            for name, definition in definitions.items()
        }

    @classmethod
    def read(cls, path: Path | None, data_roots: Sequence[str] = ()) -> RegisteredCommands:
        """Read the file of an operator; no file registers nothing.

        Raises:
            SpecError: naming the file, and every wrong field of its commands.
        """
        if path is None:
            return cls({}, Path(), data_roots)
        data = read_data(path, "commands")
        _refuse_repeated_keys(path)
        parsed = parse_document(CommandsFile, data, f"commands {path}")
        commands = cls(parsed.commands, path.parent.absolute(), data_roots)
        commands.check_defaults(path)
        commands._file, commands._read = path, _contents(path)
        return commands

    def state(self) -> str:
        """Return the number of commands, and whether their file has changed since; empty without a file."""
        if self._file is None:
            return ""
        changed = "" if _contents(self._file) == self._read else "; changed since the start: restart to read it"
        return f"{len(self._definitions)} registered{changed}"

    def check_defaults(self, path: Path) -> None:
        """Check the defaults as values of callers are checked.

        Raises:
            SpecError: naming the default.
        """
        problems = []
        for name, definition in self._definitions.items():
            optional = {key: value for key, value in definition.arguments.items() if not value.required}
            try:
                checked_values(name, definition.model_copy(update={"arguments": optional}), {}, self._roots[name])
            except InvalidInputError as error:
                for fault in error.faults:
                    field = f"commands.{name}.arguments.{fault.field.rpartition('.')[2]}.default"
                    problems.append(FieldProblem(field, fault.message, fault.value))
            except DataPathNotAllowedError as error:
                problems.append(FieldProblem(f"commands.{name}.arguments", str(error)))
        if problems:
            raise SpecError(problems, f"commands {path}")

    def check_programs(self) -> None:
        """Check that the programs and folders of all commands are on this host.

        Raises:
            SpecError: naming the commands whose program or folder is missing.
        """
        problems = []
        for name, definition in self._definitions.items():
            try:
                check_command(
                    CommandModel(
                        kind="command",
                        argv=definition.argv[0][:1],
                        environment={key: text for key, text in definition.environment.items() if key == "PATH"},
                        working_directory=str(self._folder / (definition.working_directory or "")),
                    )
                )
            except SpecError as error:
                problems += [
                    FieldProblem(
                        f"commands.{name}.{problem.field.removeprefix('model.')}", problem.message, problem.value
                    )
                    for problem in error.problems
                ]
        if problems:
            raise SpecError(problems, "commands")

    def list(self) -> CommandList:
        """Return the commands, by name."""
        return CommandList(
            items=tuple(
                RegisteredCommand(
                    name=name,
                    title=definition.title or name,
                    description=definition.description,
                    argv=tuple(word for group in definition.argv for word in group),
                    world_size=definition.world_size,
                    probe_updates=definition.probe_updates,
                    probe_timeout_seconds=definition.probe_timeout_seconds,
                    arguments=schema_of(definition),
                )
                for name, definition in sorted(self._definitions.items())
            )
        )

    def resolved(self, spec: CommandSpec) -> CommandSpec:
        """Return the command that a spec names, with the parts that the operator has registered.

        The result resolves to itself. A spec that has registered parts already is accepted with the same parts only.

        Raises:
            CommandNotAllowedError: when the spec has a command of its caller.
            InvalidInputError: naming every wrong field.
            DataPathNotAllowedError: when a path lies outside the data roots.
        """
        given = spec.model
        if given.name is None:
            raise CommandNotAllowedError(
                f"spec.model.argv is not run by this service, because a command is any program: {_REMEDY}"
            )
        definition = self._definition(given.name)
        values = checked_values(given.name, definition, given.arguments, self._roots[given.name])
        model = self._model(given.name, definition, values)
        found = CommandSpec(
            model=model.model_copy(update={"definition": _digest(definition, model)}),
            parallelism=RanksSpec(world_size=definition.world_size),
        )
        self._check_given(spec, found)
        return found

    def probe_timeout(self, spec: CommandSpec, given: float | None) -> float | None:
        """Return the time limit of a probe: what a caller gave, within that of the operator, or none for the default.

        Raises:
            InvalidInputError: when the caller's is longer.
        """
        longest = self._definition(str(spec.model.name)).probe_timeout_seconds
        if longest is not None and given is not None and given > longest:
            message = f"must be at most {longest:g}, the limit of `{spec.model.name}`"
            raise InvalidInputError.listing(
                [FieldFault(field="probe_timeout_seconds", message=message, value=f"{given:g}")]
            )
        return longest if given is None else given

    def check_current(self, spec: CommandSpec) -> None:
        """Check that a spec of a submission is what its name and arguments stand for here and now.

        Raises:
            SpecError: when the registration, or the target of a path, is another one.
        """
        try:
            found = self.resolved(spec)
        except RequestError as error:
            raise SpecError([FieldProblem("model.name", f"is registered differently on this host: {error}")]) from None
        changed = [
            name
            for name in CommandModel.model_fields
            if name != "definition" and getattr(found.model, name) != getattr(spec.model, name)
        ]
        if changed or found.parallelism != spec.parallelism:
            changed = changed or ["world_size"]
            message = f"has another registration than at the submission ({', '.join(changed)}): submit it again"
            raise SpecError([FieldProblem("model.name", message, repr(spec.model.name))])

    def _definition(self, name: str) -> CommandDefinition:
        found = self._definitions.get(name)
        if found is not None:
            return found
        near = suggestion(name, self._definitions)
        registered = ", ".join(sorted(self._definitions)) or "none"
        remedy = f" (registered: {registered}; the operator adds others to the file BATCHWRIGHT_COMMANDS)"
        message = f"is not a registered command{near or remedy}"
        raise InvalidInputError.listing([FieldFault(field="spec.model.name", message=message, value=repr(name))])

    def _model(self, name: str, definition: CommandDefinition, values: Mapping[str, Value]) -> CommandModel:
        """Return a command with its arguments; those without a value take the words with them that name them."""

        def has_values(text: str) -> bool:
            return all(argument in values for argument in arguments_in(text))

        groups = [group for group in definition.argv if all(map(has_values, group))]
        words = [_word(word, definition, values) for group in groups for word in group]
        argv = tuple(word for word in words if word is not None)
        environment = {key: text for key, text in definition.environment.items() if has_values(text)}
        of_probes = (*definition.probe_arguments, *definition.probe_environment.values())
        return CommandModel(
            kind="command",
            argv=argv,
            name=name,
            arguments=dict(values),
            environment=environment,
            working_directory=str(self._folder / (definition.working_directory or "")),
            files=_used_files(definition.files, [*argv, *environment.values(), *of_probes]),
            **{name: getattr(definition, name) for name in _TAKEN_AS_REGISTERED},
        )

    @staticmethod
    def _check_given(spec: CommandSpec, found: CommandSpec) -> None:
        """Check that the other fields of a spec are those of the registration, or are left out or at their defaults."""
        given, model = spec.model, found.model
        if given.argv and given.argv != model.argv:
            raise CommandNotAllowedError(
                f"spec.model.argv is not that of the registered command {given.name!r}: leave out `argv`, and give "
                f"`arguments`; if the operator has changed the command since a tuning, tune again; or {_REMEDY}"
            )
        message = f"is set by the registration of `{given.name}`: leave it out"
        faults = [
            FieldFault(field=f"spec.model.{name}", message=message)
            for name, field in sorted(CommandModel.model_fields.items())
            if name not in {*_OF_CALLERS, "argv"}  # programs may send a default for a field that they leave out
            and getattr(given, name) not in (getattr(model, name), field.get_default(call_default_factory=True))
        ]
        ranks, registered = spec.parallelism.world_size, found.parallelism.world_size
        if ranks not in {registered, RanksSpec().world_size}:
            message = f"must be {registered}, the ranks that `{given.name}` starts; or leave it out"
            faults.append(FieldFault(field="spec.parallelism.world_size", message=message, value=str(ranks)))
        if faults:
            raise InvalidInputError.listing(faults)


def _contents(path: Path) -> str:
    """Return a text that differs for files with other contents; empty where the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _word(word: str, definition: CommandDefinition, values: Mapping[str, Value]) -> str | None:
    """Return a word of the command line: of a boolean that selects it, the operator's word for its value, or none."""
    for name in arguments_in(word):
        argument = definition.arguments[name]
        if isinstance(argument, BooleanArgument) and argument.selects_word:
            return argument.when_true if values[name] else argument.when_false
    return word


def _used_files(files: Mapping[str, str], texts: Sequence[str]) -> dict[str, str]:
    """Return the configuration files that texts name, and those that these name in turn."""
    used: dict[str, str] = {}
    waiting = list(texts)
    while waiting:
        for name in placeholders_in(waiting.pop()):
            file = name.removeprefix(FILE_PREFIX)
            if name.startswith(FILE_PREFIX) and file not in used:
                used[file] = files[file]
                waiting.append(files[file])
    return {name: text for name, text in files.items() if name in used}


def _digest(definition: CommandDefinition, model: CommandModel) -> str:
    """SHA-256 of a registration without its texts for people, and of the files that the command line names."""
    registered = definition.model_dump(mode="json", exclude={"title", "description"})
    for argument in registered["arguments"].values():
        del argument["description"]
    paths = [value for value in model.arguments.values() if isinstance(value, str) and value.startswith("/")]
    contents = contents_of_files(model.model_copy(update={"argv": (*model.argv, *paths)}))
    content = {"registration": registered, "contents": contents}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _refuse_repeated_keys(path: Path) -> None:
    """Refuse a file that has a key twice in one mapping: a parser would silently keep the last."""
    problems: list[FieldProblem] = []

    def walk(node: yaml.Node | None, names: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    where = f"appears twice (again in line {key.start_mark.line + 1})"
                    problems.append(FieldProblem(".".join((*names, name)), where))
                seen.add(name)
                walk(value, (*names, name))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                walk(value, (*names, str(number)))

    with suppress(yaml.YAMLError):  # a JSON file with tabs
        walk(yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), ())
    if problems:
        raise SpecError(problems, f"commands {path}")
