"""The target's own parser reads back what an export wrote, for any strings and sizes."""

import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from batchwright.errors import ExportError
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import PRINTED
from tests.support.exports import reading
from tests.support.exports.plans import plan
from tests.support.factories import CUDA, gpt_spec, plan_of, transformers_spec

_NASTY = (
    "it's",
    '"quoted"',
    "a\nb: c",
    "a\n---\nb: c",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "' ; touch pwned ; '",
    '"$(touch pwned)"',
    "key: value",
    "# comment",
    "%(name)s %s {x} {{y}} ${HOME} $$ $(HOME)",
    "-rf --help",
    "--- ",
    "\\",
    "\\' ; touch pwned",
    "é 漢 \u2028 \U0001f600",
    "null",
    "'''\"\"\"\nimport os\n",
    "tab\t and \r return",
    "&anchor *alias !!python/object",
    "EOF\ntouch pwned\n",
    "yes",
    "0x1F",
)
_VALUES = st.sampled_from(_NASTY) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
_UNSAFE = _VALUES.filter(lambda item: shlex.quote(item) != item)
"""Strings that a shell needs quotes for, so that they can be told from the script around them."""
_WORDS = _UNSAFE.filter(lambda item: bool(item) and re.fullmatch(PRINTED, item) is not None)
"""Those that options may hold: without control characters."""
_STRINGS = {"id": _UNSAFE, "device": _UNSAFE, "value": _UNSAFE, "model": _WORDS.filter(str.isascii)}

_PLAIN = {name: f"plain {name}" for name in _STRINGS}

_EVERY = [(target.name, version) for target in TARGETS.values() for version in target.versions]


@st.composite
def _plans(draw: st.DrawFn) -> Recommendation:
    world = draw(st.integers(1, 16))
    spec = gpt_spec(
        precision=draw(st.sampled_from(["fp32", "bf16-mixed", "fp16-mixed", "bf16"])),
        activation_checkpointing=draw(st.booleans()),
        gradient_clipping=draw(st.none() | st.floats(1e-3, 1e3)),
        parallelism={"strategy": draw(st.sampled_from(["ddp", "fsdp"]))},
    )
    return plan(draw(st.integers(world, 2048)), world, draw(st.integers(1, 128)), spec)


@pytest.mark.parametrize(("name", "version"), _EVERY)
@settings(max_examples=15, deadline=None)
@given(recommendation=_plans())
def test_the_figures_are_read_back(name: str, version: str, recommendation: Recommendation) -> None:
    """Files say the figures of the export, and where all micro-batches have one size they multiply to its batch."""
    given = export(recommendation, name, version=version, options=ExportOptions(allow_inexact=True))

    read = reading.figures(given)

    assert read.get("micro", given.plan.micro_batch_size) == given.plan.micro_batch_size
    assert read.get("steps", given.plan.gradient_accumulation_steps) == given.plan.gradient_accumulation_steps
    assert read.get("world", given.plan.world_size) == given.plan.world_size == plan_of(recommendation).world_size
    assert read.get("effective", given.plan.effective_batch_size) == given.plan.effective_batch_size
    assert len(read) >= 2
    if TARGETS[name].repeats_one_size:
        product = given.plan.micro_batch_size * given.plan.gradient_accumulation_steps * given.plan.world_size
        assert product == given.plan.effective_batch_size
    assert given.plan.micro_batch_size <= (recommendation.largest_micro_batch_size or 0)


def _with_strings(strings: dict[str, str]) -> Recommendation:
    spec = transformers_spec("causal-lm", {"model_type": strings["model"]}, batch={"sequence_length": 16})
    return plan(
        12,
        2,
        3,
        spec,
        id=strings["id"],
        device=CUDA.model_copy(update={"name": strings["device"]}),
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NOTE": strings["value"]},
    )


def _exported(name: str, version: str, strings: dict[str, str], **options: Any) -> Export:
    return export(_with_strings(strings), name, version=version, options=ExportOptions(**options))


@pytest.mark.parametrize(("name", "version"), _EVERY)
@settings(max_examples=15, deadline=None)
@given(strings=st.fixed_dictionaries(_STRINGS))
def test_no_string_of_a_recommendation_leaves_its_value(name: str, version: str, strings: dict[str, str]) -> None:
    """Documents, keys, words of the shell and statements are as with plain strings, or the export is refused."""
    plain = _exported(name, version, _PLAIN)
    try:
        hostile = _exported(name, version, strings)
    except ExportError as error:
        refused: str | None = error.reason
    else:
        refused = None
        swaps = {_PLAIN[string]: strings[string] for string in strings}
        assert reading.differences(plain, hostile, swaps) == []
    assert refused in {None, "wrong-environment"}


@pytest.mark.parametrize(("name", "version"), [item for item in _EVERY if TARGETS[item[0]].kind == "launcher"])
@settings(max_examples=15, deadline=None)
@given(option=st.sampled_from(["script", "image", "queue", "job_name"]), word=_WORDS)
def test_no_option_leaves_its_value(name: str, version: str, option: str, word: str) -> None:
    """An option that could mean more than itself is refused, or quoted."""
    swapped = f"plain {option}"
    try:
        hostile = _exported(name, version, _PLAIN, **{option: word})
        plain = _exported(name, version, _PLAIN, **{option: swapped})
    except ExportError as error:
        refused: str | None = error.reason
    else:
        refused = None
        read = f"./{word}" if option == "script" and word.startswith("-") else word  # no option of the launcher's own
        assert reading.differences(plain, hostile, {swapped: read}) == []
    assert refused in {None, "wrong-option"}


_SHELL = [
    target for target in TARGETS if any("shell" in file.media_type for file in export(plan(12, 2, 3), target).files)
]


@pytest.mark.parametrize("name", _SHELL)
def test_a_shell_sets_the_variables_and_runs_nothing_else(name: str, tmp_path: Path) -> None:
    """Run by a real shell, with stand-ins for the programs it starts, a script leaves every value as it was."""
    values = {f"NOTE_{n}": value for n, value in enumerate(_NASTY)}
    recommendation = plan(12, 2, 3, id="a\n$(touch pwned)", environment=values)
    (script,) = [file for file in export(recommendation, name).files if "shell" in file.media_type]
    work, programs = tmp_path / "work", tmp_path / "programs"
    for folder in (work, programs):
        folder.mkdir()
    for program in ("accelerate", "torchrun", "srun", "scontrol"):
        stand_in = programs / program
        stand_in.write_text("#!/bin/sh\n/usr/bin/env -0 > seen\n")
        stand_in.chmod(stat.S_IRWXU)
    (tmp_path / "script").write_text(script.content, encoding="utf-8")
    lines = '. "$1"; [ -e seen ] || /usr/bin/env -0 > seen'
    command = ["bash", "-c", lines, "bash", str(tmp_path / "script")]

    environment = {"PATH": str(programs), "SLURM_JOB_NODELIST": "a", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7"}
    subprocess.run(command, cwd=work, env=environment, check=True, executable="/bin/bash")

    seen = dict(part.split("=", 1) for part in (work / "seen").read_bytes().decode().split("\0") if part)
    assert {value: seen[value] for value in values} == values
    assert [path.name for path in work.iterdir()] == ["seen"]
