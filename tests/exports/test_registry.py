"""The registry: what is refused and why, and what an export says of the plan it holds."""

from typing import Any

import pytest

from batchwright.errors import ExportError
from batchwright.exports.base import ExportOptions
from batchwright.exports.registry import TARGETS, export, find_target
from batchwright.schemas.recommendation import Recommendation
from tests.support.exports.plans import infeasible, plan
from tests.support.factories import mlp_spec


def _refused(recommendation: Recommendation, name: str, version: str | None = None, **options: Any) -> ExportError:
    with pytest.raises(ExportError) as caught:
        export(recommendation, name, version=version, options=ExportOptions(**options))
    return caught.value


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    """The message lists every format."""
    error = _refused(plan(16), "deepsped")

    assert error.reason == "unknown-format"
    assert "'deepsped'" in str(error)
    assert all(name in str(error) for name in TARGETS)


def test_an_unknown_version_is_refused_with_the_known_ones() -> None:
    """The message names the target's versions."""
    error = _refused(plan(16), "torchtitan", version="9.9")

    assert error.reason == "unknown-version"
    assert "'9.9'" in str(error)
    assert all(version in str(error) for version in TARGETS["torchtitan"].versions)


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_version_is_the_default(name: str) -> None:
    """An export without a version is that of the first."""
    target = find_target(name)

    assert export(plan(16), name) == export(plan(16), name, version=target.versions[0])


@pytest.mark.parametrize("name", TARGETS)
def test_what_does_not_fit_is_not_exported(name: str) -> None:
    """The reason why nothing fits is handed on."""
    error = _refused(infeasible(), name)

    assert error.reason == "infeasible"
    assert "Not even one sample fits into 1.0 GiB." in str(error)


@pytest.mark.parametrize("name", [target.name for target in TARGETS.values() if target.repeats_one_size])
def test_a_changed_effective_batch_has_to_be_allowed(name: str) -> None:
    """A target that repeats one size refuses 100 over 3 ranks; allowed, it says by how much the batch changes."""
    uneven = plan(100, world_size=3, largest_micro_batch_size=9)

    error = _refused(uneven, name)
    allowed = export(uneven, name, options=ExportOptions(allow_inexact=True))

    assert error.reason == "inexact"
    assert "96 instead of 100 (-4)" in str(error)
    assert "`allow_inexact`" in str(error)
    assert allowed.plan.effective_batch_size == 96
    assert not allowed.plan.exact
    change = next(warning.message for warning in allowed.warnings if warning.code == "effective-batch-changed")
    assert change.startswith("The effective batch becomes 96 instead of 100 (-4)")


@pytest.mark.parametrize("name", [target.name for target in TARGETS.values() if target.repeats_one_size])
def test_more_steps_are_warned_about(name: str) -> None:
    """Of 34 samples, at most 7 at a time, come 17 micro-batches of 2; of 30 come 5 of 6, which needs no word."""
    (message,) = [
        warning.message
        for warning in export(plan(34, largest_micro_batch_size=7), name).warnings
        if warning.code == "more-steps"
    ]

    assert message.startswith("17 accumulation steps instead of 5: 2 is the largest size up to 7")
    assert not _warnings("more-steps", plan(30, largest_micro_batch_size=7), name)


@pytest.mark.parametrize("name", [target.name for target in TARGETS.values() if target.kind == "launcher"])
def test_a_launcher_follows_the_framework_it_passes_arguments_of(name: str) -> None:
    """By itself it carries the uneven plan; with a framework that repeats one size it is refused like that."""
    uneven = plan(100, world_size=3, largest_micro_batch_size=9)

    assert export(uneven, name).plan.exact
    assert _refused(uneven, name, arguments_of="axolotl").reason == "inexact"


@pytest.mark.parametrize("name", [target.name for target in TARGETS.values() if target.kind == "launcher"])
def test_a_launcher_passes_on_the_warnings_of_a_framework_except_ranks(name: str) -> None:
    """The framework's says how many processes to start, and the launcher starts them."""
    recommendation = plan(64, world_size=2)
    framework = [warning.code for warning in export(recommendation, "hugging-face").warnings]
    launcher = [
        warning.code
        for warning in export(recommendation, name, options=ExportOptions(arguments_of="hugging-face")).warnings
    ]

    assert "world-size" in framework
    assert "world-size" not in launcher
    assert {*framework} - {"world-size"} <= {*launcher}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("megatron", {"arguments_of": "torchtitan"}, "megatron is not a launcher"),
        ("torchrun", {"arguments_of": "deepspeed"}, "does not take the batch sizes as arguments"),
        ("torchrun", {"processes_per_node": 3}, "processes_per_node"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """The message says what does not fit."""
    error = _refused(plan(16, world_size=2), name, **options)

    assert error.reason == "wrong-option"
    assert message in str(error)


def test_an_unknown_framework_of_arguments_is_refused() -> None:
    """It is looked up like a format."""
    assert _refused(plan(16), "torchrun", arguments_of="nothing").reason == "unknown-format"


def test_a_variable_that_no_shell_can_set_is_refused() -> None:
    """Launchers write the environment, and check its names: a recommendation may have been made without its schema."""
    unchecked = plan(16).model_copy(update={"environment": {"A B": "1"}})

    error = _refused(unchecked, "torchrun")

    assert error.reason == "wrong-environment"
    assert "'A B'" in str(error)


def test_tokens_cannot_be_counted_without_a_sequence_length() -> None:
    """The later generation of torchtitan counts tokens, the earlier one samples."""
    pixels = plan(16, spec=mlp_spec())

    error = _refused(pixels, "torchtitan", version="main-2026-08-20")

    assert error.reason == "not-expressible"
    assert "`batch.sequence_length`" in str(error)
    assert export(pixels, "torchtitan", version="0.3.0").plan.micro_batch_size == 8


LAUNCHERS = [target.name for target in TARGETS.values() if target.kind == "launcher"]


def _warnings(code: str, recommendation: Recommendation, name: str, **options: Any) -> list[str]:
    given = export(recommendation, name, options=ExportOptions(**options))
    return [warning.message for warning in given.warnings if warning.code == code]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_warns_that_micro_batches_differ(name: str) -> None:
    """9 samples in 4 steps on 3 ranks are 108, not 100: a program that repeats one size has to know."""
    (message,) = _warnings("micro-batches-differ", plan(100, world_size=3, largest_micro_batch_size=9), name)

    assert "trains 108 samples per update, not 100" in message
    assert not _warnings("micro-batches-differ", plan(96, world_size=3, largest_micro_batch_size=8), name)


@pytest.mark.parametrize("framework", [target.name for target in TARGETS.values() if target.arguments_leave])
def test_a_launcher_warns_about_settings_that_arguments_omit(framework: str) -> None:
    """For frameworks with a file of their own, only the batch sizes are passed on."""
    (message,) = _warnings("figures-alone", plan(16), "torchrun", arguments_of=framework)

    assert f"an export to {framework}" in message
    assert not _warnings("figures-alone", plan(16), "torchrun", arguments_of="hugging-face")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("option", "value"),
    [("script", "mine.py"), ("job_name", "mine"), ("processes_per_node", 2), ("image", "mine:1"), ("queue", "mine")],
)
def test_an_unused_option_is_warned_about(name: str, option: str, value: Any) -> None:
    """It changes an export, except where a warning says that it does not."""
    if option == "queue" and name in {"torchrun", "ray-jobs"}:
        assert _refused(plan(16), name, queue=value).reason == "wrong-option"
        return
    ranks = plan(16, world_size=4)
    usual, given = export(ranks, name), export(ranks, name, options=ExportOptions.model_validate({option: value}))
    unused = [warning for warning in given.warnings if warning.code == "option-not-used"]
    rest = given.model_copy(update={"warnings": tuple(warning for warning in given.warnings if warning not in unused)})

    if name != "torchrun" or option != "job_name":  # it names the meeting of several nodes
        assert (rest == usual) is bool(unused)
