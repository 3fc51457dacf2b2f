"""Tests of the operator's file: every fault names the file, the command and the field."""

from pathlib import Path

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.command import CommandSpec
from batchwright_service.registry.registered_commands import RegisteredCommands
from tests.support.documents import blocks_of
from tests.support.paths import ROOT

GOOD = """
commands:
  sft:
    argv: [python, train.py, --batch-size, "{micro_batch_size}", "--rate={argument:rate}", [--tag, "{argument:tag}"]]
    arguments:
      rate: {type: number, minimum: 1e-6, maximum: 1.0, default: 0.1}
      tag: {type: string}
"""


def read(tmp_path: Path, text: str, *data_roots: str) -> RegisteredCommands:
    """The commands of a file."""
    path = tmp_path / "commands.yaml"
    path.write_text(text)
    return RegisteredCommands.read(path, data_roots)


def fault(tmp_path: Path, text: str) -> str:
    """The message with which a file is refused."""
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "commands.yaml") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("minimum: 1e-6", "minimun: 1e-6", "commands.sft.arguments.rate.minimun: is not a field here; did you mean"),
        ("minimum: 1e-6, ", "", "commands.sft.arguments.rate.minimum: is required"),
        ("minimum: 1e-6", "minimum: 2.0", "`minimum` is 2.0, above `maximum`, which is 1.0"),
        ("default: 0.1", "default: 3", "`default` is 3.0, outside 1e-06 to 1.0"),
        ("type: number", "type: float", "commands.sft.arguments.rate.type: must be one of"),
        (
            "type: string",
            "type: string, pattern: '('",
            "arguments.tag: `pattern` is not a regular expression: unclosed",
        ),
        ("type: string", r"type: string, pattern: (a)\1", "not a regular expression: backreferences are not supported"),
        ("type: string", "type: string, pattern: 'a)|(?:b'", "`pattern` is not a regular expression: unopened group"),
        ("type: string", "type: string, pattern: '(a{0,300}){0,150}'", "`pattern` is too large for texts of 256"),
        ("type: string", "type: string, max_length: 100000", "arguments.tag.max_length: must be at most 4096"),
        ("type: string", "type: enum, values: []", "commands.sft.arguments.tag.values: must have at least 1 item"),
        ("type: string", "type: enum, values: [a], default: b", "`default` is 'b', which is not one of `values`"),
        (
            "type: string",
            "type: string, required: true, default: x",
            "`arguments.tag` is required, so its default",
        ),
        ("{micro_batch_size}", "{micro_batchsize}", "`argv.3` has the unknown placeholder `{micro_batchsize}`"),
        ("{argument:tag}", "{argument:tags}", "did you mean `{argument:tag}`?"),
        ("{argument:tag}", "x", "`arguments.tag` is not used: name it as `{argument:tag}`"),
        ("{micro_batch_size}", "8", "commands.sft: no field has `{micro_batch_size}`"),
        ("sft:", "SFT:", "must be a name of up to 64 lower-case letters"),
        ("rate: {", "Rate: {", "must be a name of up to 64 lower-case letters"),
        ("argv: [python", "argv: [2.5", "commands.sft.argv.0.0: must be a text"),
        ("argv:", "data_roots: [data]\n    argv:", "commands.sft.data_roots: has 'data', which is not absolute"),
        ("argv:", "world_size: 0\n    argv:", "commands.sft.world_size: must be at least 1"),
        ("argv:", "probe_updates: 1\n    argv:", "commands.sft.probe_updates: must be at least 2"),
        ("argv:", "environment: {1A: x}\n    argv:", "must have a name of letters, digits and underscores"),
        ("type: string", "type: string, default: -x", "commands.sft.arguments.tag.default: must not begin with `-`"),
        ("type: string", "type: path, default: /etc/passwd", "'/etc/passwd' is outside the folders"),
        ("commands:", "command:", "command: is not a field here; did you mean `commands`?"),
        (
            "      tag:",
            "      rate: {type: boolean}\n      tag:",
            "commands.sft.arguments.rate: appears twice (again in line 7)",
        ),
        ("rate: {", "rate: {{", "is not valid YAML: line 7, column 7"),
    ],
)
def test_a_fault_names_its_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Every command of the file is checked at the start of the service."""
    assert old in GOOD
    assert message in fault(tmp_path, GOOD.replace(old, new, 1))


def test_a_size_that_may_be_left_out_is_refused(tmp_path: Path) -> None:
    """Words in a list go with their argument, and the program would take its own batch size."""
    text = GOOD.replace('"{micro_batch_size}", ', '"8", ').replace('[--tag, "', '[--batch, "{micro_batch_size}", "')
    assert "(fields that are left out when" in fault(tmp_path, text)


def test_the_file_of_the_documents_is_valid(tmp_path: Path) -> None:
    """And makes the command that the page describes."""
    blocks = blocks_of((ROOT / "docs" / "commands.md").read_text())
    (text,) = (block.text for block in blocks if block.title == "commands.yaml")
    spec = CommandSpec.model_validate(
        {"model": {"kind": "command", "name": "sft", "arguments": {"learning_rate": 1e-4, "packing": True}}}
    )
    model = read(tmp_path, text).resolved(spec).model
    assert model.argv[4:] == ("--learning-rate={argument:learning_rate}", "--packing", "--config={file:model.yaml}")
    assert model.working_directory == "/srv/train"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(SpecError, match=r"nowhere\.yaml: cannot be read: No such file"):
        RegisteredCommands.read(tmp_path / "nowhere.yaml")


def test_no_file_registers_nothing() -> None:
    """The list is empty."""
    commands = RegisteredCommands.read(None)
    assert commands.list().items == ()
    assert commands.state() == ""


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    """The change counts from the next start."""
    commands = read(tmp_path, GOOD)
    assert commands.state() == "1 registered"
    (tmp_path / "commands.yaml").write_text(GOOD + "# more\n")
    assert commands.state() == "1 registered; changed since the start: restart to read it"


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A host with workers needs the programs and folders."""
    commands = read(tmp_path, GOOD.replace("python", "no-such-program", 1))
    with pytest.raises(SpecError, match=r"commands\.sft\.argv\.0: cannot be started.*no-such-program"):
        commands.check_programs()
    absent = read(tmp_path, GOOD.replace("argv:", "working_directory: absent\n    argv:"))
    with pytest.raises(SpecError, match=r"commands\.sft\.working_directory: is not a folder"):
        absent.check_programs()


def test_the_arguments_have_a_json_schema(tmp_path: Path) -> None:
    """From which forms are made."""
    (command,) = read(tmp_path, GOOD).list().items
    assert command.arguments == {
        "type": "object",
        "properties": {
            "rate": {"type": "number", "minimum": 1e-6, "maximum": 1.0, "default": 0.1},
            "tag": {"type": "string", "minLength": 1, "maxLength": 256},
        },
        "required": [],
        "additionalProperties": False,
    }
