"""Exports to frameworks that build model and optimizer themselves: what of a spec they do not hold. Pure."""

import pytest

from batchwright.exports.registry import export
from batchwright.schemas.workload import WorkloadSpec
from tests.support.exports.plans import plan
from tests.support.factories import gpt_spec

RECIPES = ("megatron", "torchtitan", "nemo-automodel", "axolotl", "llama-factory")


def warned(name: str, spec: WorkloadSpec) -> dict[str, str]:
    """Messages by their codes."""
    return {warning.code: warning.message for warning in export(plan(16, spec=spec), name).warnings}


@pytest.mark.parametrize("name", RECIPES)
def test_settings_that_a_recipe_omits_are_warned_about(name: str) -> None:
    """Compiling changes memory, and an average of the weights what is trained."""
    warnings, plain = warned(name, gpt_spec(compile=True, ema_decay=0.999)), warned(name, gpt_spec())

    assert warnings["compile-not-written"].startswith("This export does not turn compiling on")
    assert "0.999" in warnings["moving-average"]
    assert not {"compile-not-written", "moving-average"} & set(plain)


def test_automodel_warns_about_the_longest_sample() -> None:
    """None of its keys holds the length that was measured."""
    assert "16 tokens" in warned("nemo-automodel", gpt_spec())["longest-sample"]
