"""Tests of the places where the text of a caller may stand: none where it becomes an option, code or syntax."""

from typing import Any

import pytest
from pydantic import ValidationError

from batchwright_service.registry.definitions import CommandDefinition

SIZE = "--batch={micro_batch_size}"
TEXT = {"text": {"type": "string", "default": "x"}}


def message(**fields: Any) -> str:
    """The message with which a definition is refused."""
    with pytest.raises(ValidationError) as caught:
        CommandDefinition.model_validate({"arguments": TEXT, **fields})
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{argument:text}", SIZE], "no caller may choose"),
        (["bash", "-c", "python t.py {argument:text}", SIZE], "code for a shell"),
        (["bash", "-lc", 'python t.py "$1"', "t.py", "{argument:text}", SIZE], "code for a shell"),
        (["env", "/bin/sh", "-c", "t.sh", "{argument:text}", SIZE], "code for a shell"),
        (["python", "{argument:text}", SIZE], "runs what its arguments name"),
        (["python3.11", "-X{argument:text}", "t.py", SIZE], "makes an option of a caller's value"),
        (["python", "-u", "{argument:text}", SIZE], "after the script"),
        (["python", "-m", "{argument:text}", SIZE], "after which shells and interpreters take code"),
        (["bash", "--rcfile={argument:text}", "t.sh", SIZE], "runs what its arguments name"),
        (["env", "LD_PRELOAD={argument:text}", "python", "t.py", SIZE], "runs what its arguments name"),
        (["accelerate", "launch", "{argument:text}", SIZE], "after the script"),
        (["torchrun", "--nproc-per-node", "2", "{argument:text}", SIZE], "after the script"),
        (["perl", "x.pl", "-e", "{argument:text}", SIZE], "take code"),
        (["train", "-{argument:text}", SIZE], "makes an option of a caller's value"),
        (["train", "--{argument:text}", SIZE], "makes an option of a caller's value"),
        (["train", "echo $({argument:text})", SIZE], "could become code"),
        (["train", "a;{argument:text}", SIZE], "could become code"),
        (["train", "@{argument:text}", SIZE], "could become code"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_word_that_could_become_more_is_refused(argv: list[str], words: str) -> None:
    """With the way to write it."""
    assert words in message(argv=argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "t.py", "{argument:text}", SIZE],
        ["python", "-u", "t.py", "--text", "{argument:text}", SIZE],
        ["python", "-m", "train", "--text={argument:text}", SIZE],
        ["accelerate", "launch", "t.py", "model.text={argument:text}", SIZE],
        ["bash", "train.sh", "{argument:text}", SIZE],
        ["/srv/train/run", "{argument:text}", "--tokens={micro_batch_size*1024}"],
        ["/srv/train/run", "{argument:text}-{updates*2}", SIZE],
    ],
    ids=" ".join,
)
def test_a_word_of_its_own_is_allowed(argv: list[str]) -> None:
    """After the script, alone or after an equals sign."""
    assert CommandDefinition.model_validate({"argv": argv, "arguments": TEXT}).argv


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "PYTHONPATH", "BASH_ENV", "PERL5OPT", "NODE_OPTIONS"])
def test_no_caller_sets_a_variable_that_runs_code(name: str) -> None:
    """Others are data."""
    fields = {"argv": ["train", SIZE], "arguments": TEXT}
    assert "no caller may set it" in message(argv=fields["argv"], environment={name: "{argument:text}"})
    assert CommandDefinition.model_validate({**fields, "environment": {"TAG": "{argument:text}"}})


def test_a_shells_code_gets_no_text_by_a_variable() -> None:
    """A shell would split and expand it."""
    argv = ["sh", "-c", "python t.py --tag $TAG {micro_batch_size}"]
    assert "code for a shell" in message(argv=argv, environment={"TAG": "{argument:text}"})


def test_arguments_of_probes_have_no_value_of_a_caller() -> None:
    """They are flags of the operator."""
    argv = ["train", SIZE, "{argument:text}"]
    assert "`probe_arguments.0`" in message(argv=argv, probe_arguments=["--x={argument:text}"])
    assert "`probe_environment.X`" in message(argv=argv, probe_environment={"X": "{argument:text}"})


def test_a_boolean_that_selects_a_word_is_alone() -> None:
    """It has no text of its own."""
    arguments = {"packing": {"type": "boolean", "when_true": "--packing"}}
    assert "selects a whole word" in message(argv=["train", SIZE, "--x={argument:packing}"], arguments=arguments)


@pytest.mark.parametrize(
    ("name", "template", "words"),
    [
        ("a.yaml", 'text: "{argument:text}"', "cannot be read"),
        ("a.yaml", "text: a {argument:text}", "within other text, a comment or a key"),
        ("a.yaml", "text: 1 # {argument:text}", "within other text, a comment or a key"),
        ("a.yaml", "{argument:text}: 1", "within other text, a comment or a key"),
        ("a.yaml", "text: |\n  {argument:text}\n", "within other text, a comment or a key"),
        ("a.yaml", "text: '{argument:text}'", "within other text, a comment or a key"),
        ("a.json", '{"text": "{argument:text}"}', "cannot be read"),
        ("a.json", '{"text": "a", {argument:text}: 1}', "within other text, a comment or a key"),
        ("a.toml", 'text = "{argument:text}"', "cannot be read"),
        ("a.toml", "text = '{argument:text}'", "within other text, a comment or a key"),
        ("a.cfg", "text = {argument:text}", "its name must end with one of .json, .toml, .yaml, .yml"),
        ("a.sh", "echo {argument:text}", "its name must end with one of"),
    ],
)
def test_a_value_is_a_whole_value_of_a_file(name: str, template: str, words: str) -> None:
    """Elsewhere its quotes would not hold it."""
    found = message(argv=["train", SIZE, f"{{file:{name}}}"], files={name: template})
    assert f"`files.{name}`" in found
    assert words in found


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("a.yaml", "a: {b: [{argument:text}, 1]}\ntokens: {(micro_batch_size+1)*1024}\n"),
        ("a.json", '{"a": {"b": [{argument:text}, {micro_batch_size}]}}'),
        ("a.toml", "[a]\nb = [{argument:text}]\nsize = {micro_batch_size}\n"),
    ],
)
def test_a_whole_value_is_allowed(name: str, template: str) -> None:
    """In every format that is quoted."""
    argv = ["train", SIZE, f"{{file:{name}}}"]
    assert CommandDefinition.model_validate({"argv": argv, "arguments": TEXT, "files": {name: template}})


def test_a_value_of_a_file_is_always_there() -> None:
    """TOML has no null, and a program's default is not known."""
    arguments = {"text": {"type": "string"}}
    files = {"a.yaml": "text: {argument:text}"}
    assert "which may have no value" in message(argv=["train", SIZE, "{file:a.yaml}"], files=files, arguments=arguments)
