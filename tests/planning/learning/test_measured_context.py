"""The context that estimates expect, by what earlier tunings on such a card measured."""

from typing import Any

import pytest

from batchwright.planning.learning.measured_context import expect_measured_context
from batchwright.planning.session import TuningSession
from batchwright.schemas.requests import TuningRequest
from tests.support.factories import CUDA, gpt_spec, residual

MIB = 1024**2
TABLE = 300 * MIB
HERE = {"torch": "2.13.0", "python": "3.11.7"}


def expected(*contexts: int | None, **versions: str) -> int:
    """The context in the request for an estimate, after tunings that measured ``contexts`` under ``versions``."""
    device = CUDA.model_copy(update={"expected_context_bytes": TABLE})
    request = TuningRequest(spec=gpt_spec(), effective_batch_size=64)
    tuning = TuningSession(request, device, environment={}, versions=HERE)
    then = {**tuning.conditions.versions, **versions}
    expect_measured_context(tuning, [residual(context_bytes=found, versions=then) for found in contexts])
    asked = tuning.expectation_request()
    assert asked is not None
    return asked.context_bytes


def test_without_measurements_the_table_is_expected() -> None:
    """Neither no residuals nor those without a context change anything."""
    assert expected() == expected(None, None) == TABLE


@pytest.mark.parametrize("measured", [200 * MIB, 556 * MIB], ids=["smaller", "larger"])
def test_one_measurement_outweighs_the_table(measured: int) -> None:
    """Versions that leave the context as it is do not matter."""
    assert expected(measured) == expected(measured, python="3.12.0") == measured


@pytest.mark.parametrize("changes", [{"torch": "2.8.0"}, {"driver": "2.0"}], ids=str)
def test_measurements_under_other_versions_count_less(changes: dict[str, Any]) -> None:
    """A single one does not move the table's figure, and three do."""
    assert expected(556 * MIB, **changes) == TABLE
    assert expected(*[556 * MIB] * 3, **changes) == 556 * MIB


def test_a_measurement_that_was_disturbed_is_outvoted() -> None:
    """Another process that takes memory while a context is measured makes it seem larger once."""
    assert expected(4096 * MIB, 556 * MIB, 556 * MIB, 556 * MIB) == 556 * MIB
