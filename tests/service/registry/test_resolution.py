"""Tests of what a name and arguments become: values stay in their place, whatever they hold."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.commands.templates import Figures, RenderedCommand, render
from batchwright.errors import SpecError
from batchwright.schemas.command import CommandSpec
from batchwright_service.errors import CommandNotAllowedError, DataPathNotAllowedError, InvalidInputError
from batchwright_service.registry.definitions import CommandsFile, StringArgument
from batchwright_service.registry.registered_commands import RegisteredCommands

FIGURES = Figures(micro_batch_size=4, accumulation_steps=2, world_size=1, updates=3)
PRINTER = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('TEXT')]))"
NASTY = [
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "a b  c",
    "* ? [a-z] ~ $HOME",
    "a' \" \\ \\n",
    "&& | > < & ! #",
    "{micro_batch_size}",
    "{{updates}}",
    "micro_batch_size}",
    "{argument:other}",
    "{file:a.yaml}",
    '", "evil": "1',
    '"\nevil: 1',
    "1 # comment",
    "!!python/object/apply:os.system [id]",
    "&anchor *alias",
    "a: b",
    "[x]",
    "{x: 1}",
    "''' \"\"\"",
    "é ß 漢字 😀",
    "true",
    "null",
    "1e-5",
    "~",
]


@pytest.mark.timeout(20)  # with `re`, each of these takes years
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("([a-z0-9]+-?)+", "a" * 255),
        ("(a+)+", "a" * 255),
        ("(a|aa)+", "a" * 255),
        ("(.*,){1,30}x", "," * 255),
        ("(x+x+)+y", "x" * 255),
        ("([a-z]?[a-z]?){100}", "a" * 255),
    ],
)
def test_a_pattern_takes_linear_time(pattern: str, text: str) -> None:
    """No value of a caller has a pattern of the operator backtrack."""
    argument = StringArgument(type="string", pattern=pattern)
    assert not argument.matches(text + "!")
    assert not argument.matches(text[:-1] + "\n")
    assert StringArgument(type="string", pattern=rf"{pattern}|{text}!").matches(text + "!")


def test_unknown_arguments_are_suggested_for_the_first_only(tmp_path: Path) -> None:
    """A similar name is looked for in a bounded number, and all are counted."""
    given = {f"text{index}": 1 for index in range(4_000)}
    with pytest.raises(InvalidInputError, match="4000 faults; the first 20") as caught:
        commands(tmp_path).resolved(spec(**given))
    assert len(caught.value.faults) == 20


def commands(tmp_path: Path, **changes: Any) -> RegisteredCommands:
    """A command that prints its words, with an argument of each type and three configuration files."""
    (tmp_path / "printer.py").write_text(PRINTER)
    definition = {
        "argv": [
            sys.executable,
            "printer.py",
            "{micro_batch_size}",
            "{argument:text}",
            "--text={argument:text}",
            ["--rate", "{argument:rate}"],
            "{argument:packing}",
            ["--data", "{argument:data}"],
            "{argument:flag}",
            "--steps={argument:steps}",
            "{file:a.yaml}{file:a.json}{file:a.toml}",
        ],
        "arguments": {
            "text": {"type": "string", "default": "x"},
            "other": {"type": "enum", "values": ["one", "two"], "default": "one"},
            "rate": {"type": "number", "minimum": 0, "maximum": 1},
            "steps": {"type": "integer", "minimum": -5, "maximum": 5, "default": 1},
            "packing": {"type": "boolean", "when_true": "--packing", "when_false": "--no-packing"},
            "flag": {"type": "boolean"},
            "data": {"type": "path"},
        },
        "environment": {"TEXT": "{argument:text}", "RATE": "{argument:rate}"},
        "files": {
            "a.yaml": "before: 1\ntext: {argument:text}\nother: {argument:other}\nflag: {argument:flag}\nafter: 2\n",
            "a.json": '{"before": 1, "text": {argument:text}, "steps": {argument:steps}, "after": 2}',
            "a.toml": "before = 1\ntext = {argument:text}\nafter = 2\n",
        },
        "data_roots": [str(tmp_path / "root")],
    }
    (tmp_path / "root").mkdir(exist_ok=True)
    file = CommandsFile.model_validate({"commands": {"show": definition | changes}})
    return RegisteredCommands(file.commands, tmp_path)


def spec(**arguments: Any) -> CommandSpec:
    """The spec of a caller."""
    return CommandSpec.model_validate({"model": {"kind": "command", "name": "show", "arguments": arguments}})


def rendered(tmp_path: Path, **arguments: Any) -> RenderedCommand:
    """The command as a probe starts it."""
    return render(commands(tmp_path).resolved(spec(**arguments)).model, FIGURES, tmp_path / "probe")


def faults(tmp_path: Path, **arguments: Any) -> dict[str, str]:
    """The messages of wrong arguments by their fields."""
    with pytest.raises(InvalidInputError) as caught:
        commands(tmp_path).resolved(spec(**arguments))
    return {fault.field.removeprefix("spec.model.arguments."): fault.message for fault in caught.value.faults}


@pytest.mark.parametrize("text", [text for text in NASTY if "\n" not in text])
def test_a_text_is_one_word(tmp_path: Path, text: str) -> None:
    """The program itself prints its words and its variable: no shell has read them, nor a second rendering."""
    command = rendered(tmp_path, text=text)
    done = subprocess.run(
        command.argv, cwd=tmp_path, env=command.environment, capture_output=True, text=True, check=True, timeout=60
    )
    words, variable = json.loads(done.stdout)
    assert words[:3] == ["4", text, f"--text={text}"]
    assert variable == text
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("text", [text for text in NASTY if "\n" not in text])
def test_a_text_stays_in_its_value_of_a_file(tmp_path: Path, text: str) -> None:
    """Each format reads the same text, and no key more."""
    command = rendered(tmp_path, text=text)
    by_name = {path.name: content for path, content in command.files.items()}
    assert yaml.safe_load(by_name["a.yaml"]) == {"before": 1, "text": text, "other": "one", "flag": False, "after": 2}
    assert json.loads(by_name["a.json"]) == {"before": 1, "text": text, "steps": 1, "after": 2}
    assert tomllib.loads(by_name["a.toml"]) == {"before": 1, "text": text, "after": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-rf", "must not begin with `-` or `@`"),
        ("--config=/etc/passwd", "must not begin with `-` or `@`"),
        ("@/etc/passwd", "must not begin with `-` or `@`"),
        ("a\0b", "printable"),
        ("a\nevil: 1", "printable"),
        ("a\x1b[2J", "printable"),
        ("a\u2028b", "printable"),
        ("a\u0085b", "printable"),
        ("", "must have 1 to 256 characters"),
        ("a" * 257, "must have 1 to 256 characters"),
        (7, "must be a text"),
    ],
)
def test_a_text_that_is_more_than_a_text_is_refused(tmp_path: Path, text: object, message: str) -> None:
    """Also where the schema of the request lets it pass."""
    model = spec().model.model_copy(update={"arguments": {"text": text}})
    with pytest.raises(InvalidInputError, match=message):
        commands(tmp_path).resolved(CommandSpec.model_construct(model=model))


def test_a_hyphen_may_begin_a_text_after_an_equals_sign(tmp_path: Path) -> None:
    """The word then begins with the operator's option."""
    argv = ["train", "{micro_batch_size}", "--text={argument:text}"]
    arguments = {"text": {"type": "string", "default": "x"}}
    found = commands(tmp_path, argv=argv, arguments=arguments, environment={}, files={}).resolved(spec(text="-1"))
    assert render(found.model, FIGURES, tmp_path).argv == ("train", "4", "--text=-1")


def test_arguments_without_a_value_leave_their_words_out(tmp_path: Path) -> None:
    """With the words of their list, and the variable; booleans select a word."""
    without, with_all = rendered(tmp_path), rendered(tmp_path, rate=1e-5, packing=True, flag=True)
    assert without.argv[2:-1] == ("4", "x", "--text=x", "--no-packing", "false", "--steps=1")
    assert "RATE" not in without.environment
    expected = ("4", "x", "--text=x", "--rate", "1.0e-05", "--packing", "true", "--steps=1")
    assert with_all.argv[2:-1] == expected
    assert with_all.environment["RATE"] == "1.0e-05"


def test_a_number_is_read_as_one_by_every_format(tmp_path: Path) -> None:
    """YAML 1.1 reads `1e-05` as a text, and TOML refuses `1.e5`."""
    argv = ["train", "{micro_batch_size}", "{file:a.yaml}{file:a.json}{file:a.toml}"]
    files = {"a.yaml": "v: {argument:v}", "a.json": '{"v": {argument:v}}', "a.toml": "v = {argument:v}"}
    arguments = {"v": {"type": "number", "minimum": -1e300, "maximum": 1e300, "required": True}}
    registered = commands(tmp_path, argv=argv, files=files, arguments=arguments, environment={})
    for value in (1e-5, -2.5e-7, 1e22, 3, 0.1, -0.0, 123456789.25):
        command = render(registered.resolved(spec(v=value)).model, FIGURES, tmp_path)
        texts = {path.suffix: text for path, text in command.files.items()}
        read = yaml.safe_load(texts[".yaml"]), json.loads(texts[".json"]), tomllib.loads(texts[".toml"])
        assert read == ({"v": value},) * 3
        assert all(isinstance(found["v"], float) for found in read)


def test_every_wrong_argument_is_named_with_its_bounds(tmp_path: Path) -> None:
    """And an unknown one with the nearest."""
    found = faults(tmp_path, rat=1, rate=2, steps=1.5, other="on", packing="yes", data="relative/path")
    assert found == {
        "rat": "is not an argument of `show`; did you mean `rate`?",
        "rate": "must be at most 1.0 (allowed: from 0.0 to 1.0)",
        "steps": "must be a whole number from -5 to 5",
        "other": "must be one of 'one', 'two'; did you mean 'one'?",
        "packing": "must be true or false",
        "data": "must be an absolute path without `..`",
    }
    assert faults(tmp_path, steps=True, rate=1.5) == {
        "steps": "must be a whole number from -5 to 5",
        "rate": "must be at most 1.0 (allowed: from 0.0 to 1.0)",
    }


def test_a_required_argument_is_required(tmp_path: Path) -> None:
    """Null is no value."""
    arguments = {"v": {"type": "integer", "minimum": 0, "maximum": 9, "required": True}}
    registered = commands(
        tmp_path, argv=["train", "{micro_batch_size}", "{argument:v}"], arguments=arguments, files={}, environment={}
    )
    for given in ({}, {"v": None}):
        model = spec().model.model_copy(update={"arguments": given})
        with pytest.raises(InvalidInputError, match=r"spec\.model\.arguments\.v: is required"):
            registered.resolved(CommandSpec.model_construct(model=model))


# --- paths ---


def test_a_path_is_resolved_within_the_roots(tmp_path: Path) -> None:
    """Through links that stay inside."""
    registered = commands(tmp_path)
    (tmp_path / "root" / "file").write_text("x")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "file")
    found = registered.resolved(spec(data=str(tmp_path / "root" / "link")))
    assert found.model.arguments["data"] == str((tmp_path / "root" / "file").resolve())


@pytest.mark.parametrize("way", ["outside", "link", "folder link", "beside"])
def test_a_path_outside_the_roots_is_refused(tmp_path: Path, way: str) -> None:
    """Also by a link, and by a folder whose name begins with that of a root."""
    registered = commands(tmp_path)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "rootless").mkdir()
    paths = {"outside": "secret", "link": "root/link", "folder link": "root/out/secret", "beside": "rootless"}
    with pytest.raises(DataPathNotAllowedError, match=r"spec\.model\.arguments\.data: .* outside the folders"):
        registered.resolved(spec(data=str(tmp_path / paths[way])))


@pytest.mark.parametrize("path", ["../secret", "root/../../secret", "/x\0y", "/x\ny"])
def test_a_path_that_climbs_or_hides_is_refused(tmp_path: Path, path: str) -> None:
    """Before anything is looked up."""
    model = spec().model.model_copy(update={"arguments": {"data": str(tmp_path / path)}})
    with pytest.raises(InvalidInputError, match=r"absolute path without|printable"):
        commands(tmp_path).resolved(CommandSpec.model_construct(model=model))


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Unless the program may make it."""
    assert faults(tmp_path, data=str(tmp_path / "root" / "absent")) == {
        "data": "is not a file or folder on the host that serves the API"
    }


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200, "a/" * 2000 + "a", "loop/a", "file/a"])
def test_a_path_that_no_system_opens_is_refused(tmp_path: Path, name: str) -> None:
    """Names and paths that are too long, links that go in circles, and a file in the place of a folder."""
    registered = commands(tmp_path)
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root" / "loop")
    (tmp_path / "root" / "file").write_text("x")
    with pytest.raises(InvalidInputError, match=r"cannot be read|is not a file or folder|at most 4096|outside"):
        registered.resolved(spec(data=str(tmp_path / "root" / name)))


def test_a_link_that_was_changed_is_found_before_the_next_probe(tmp_path: Path) -> None:
    """The worker resolves again: a path of the submission may lead elsewhere now."""
    registered = commands(tmp_path)
    folder = tmp_path / "root" / "folder"
    folder.mkdir()
    found = registered.resolved(spec(data=str(folder)))
    registered.check_current(found)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SpecError, match="outside the folders"):
        registered.check_current(found)
    (tmp_path / "root" / "other").mkdir()
    folder.unlink()
    folder.symlink_to(tmp_path / "root" / "other")
    with pytest.raises(SpecError, match=r"another registration than at the submission \(arguments\)"):
        registered.check_current(found)


# --- specs with parts of their own ---


def test_a_resolved_spec_resolves_to_itself(tmp_path: Path) -> None:
    """So that a stored request can be submitted again, also from its JSON."""
    registered = commands(tmp_path)
    found = registered.resolved(spec(text="a {updates} b", rate=0.5, packing=True))
    again = CommandSpec.model_validate_json(found.model_dump_json())
    assert registered.resolved(again) == found
    registered.check_current(again)


def test_another_command_line_is_refused(tmp_path: Path) -> None:
    """With a registered name or without."""
    registered = commands(tmp_path)
    found = registered.resolved(spec())
    shell = {"argv": ("sh", "-c", "{micro_batch_size}"), "files": {}}
    for changes in ({"name": None}, shell, {"argv": (*found.model.argv, "-x")}):
        other = found.model_copy(update={"model": found.model.model_copy(update=changes)})
        with pytest.raises(CommandNotAllowedError, match="batchwright tune"):
            registered.resolved(CommandSpec.model_validate_json(other.model_dump_json()))


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"LD_PRELOAD": "x.so"}},
        {"working_directory": "/"},
        {"probe_arguments": ["--evil"]},
        {"probe_environment": {"LD_PRELOAD": "x.so"}},
        {"allow_overwriting": True},
        {"probe_updates": 5000},
        {"loading_timeout_seconds": 86400},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_part_of_the_operator_cannot_be_given(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Alone or in a whole spec."""
    given = CommandSpec.model_validate({"model": {"kind": "command", "name": "show", **changes}})
    name = next(iter(changes))
    with pytest.raises(InvalidInputError, match=rf"spec\.model\.{name}: is set by the registration of `show`"):
        commands(tmp_path).resolved(given)


def test_the_ranks_are_those_of_the_operator(tmp_path: Path) -> None:
    """They may be left out."""
    registered = commands(tmp_path, world_size=2)
    assert registered.resolved(spec()).parallelism.world_size == 2
    data = {"model": {"kind": "command", "name": "show"}, "parallelism": {"world_size": 4}}
    with pytest.raises(InvalidInputError, match=r"spec\.parallelism\.world_size: must be 2"):
        registered.resolved(CommandSpec.model_validate(data))


def test_the_definition_changes_with_the_registration_and_its_files(tmp_path: Path) -> None:
    """But not with texts for people."""
    first = commands(tmp_path).resolved(spec()).model.definition
    assert commands(tmp_path, title="Another", description="text").resolved(spec()).model.definition == first
    assert commands(tmp_path, environment={"TEXT": "x"}).resolved(spec()).model.definition != first
    registered = commands(tmp_path)
    (tmp_path / "printer.py").write_text(PRINTER + "\n# changed")
    assert registered.resolved(spec()).model.definition != first


def test_the_time_limit_is_bounded_by_the_operator(tmp_path: Path) -> None:
    """A caller may ask for less."""
    bounded, free = commands(tmp_path, probe_timeout_seconds=60), commands(tmp_path)
    assert [bounded.probe_timeout(spec(), given) for given in (None, 20.0)] == [60, 20.0]
    assert [free.probe_timeout(spec(), given) for given in (None, 500.0)] == [None, 500.0]
    with pytest.raises(InvalidInputError, match="probe_timeout_seconds: must be at most 60"):
        bounded.probe_timeout(spec(), 61.0)


def test_a_file_that_no_word_names_any_more_is_left_out(tmp_path: Path) -> None:
    """It goes with the optional argument beside it."""
    registered = commands(
        tmp_path,
        argv=["train", "{micro_batch_size}", ["--rate={argument:rate}", "{file:a.yaml}"]],
        files={"a.yaml": "other: {file:b.yaml}", "b.yaml": "steps: {updates}"},
        arguments={"rate": {"type": "number", "minimum": 0, "maximum": 1}},
        environment={},
    )
    assert registered.resolved(spec()).model.files == {}
    assert set(registered.resolved(spec(rate=0.5)).model.files) == {"a.yaml", "b.yaml"}
