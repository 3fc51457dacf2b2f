"""Every target writes what was read by eye."""

import pytest

from batchwright.exports.registry import TARGETS
from tests.support.exports import golden


@pytest.mark.parametrize(("name", "version", "shape"), golden.cases())
def test_a_target_writes_what_was_read_by_eye(name: str, version: str, shape: str) -> None:
    """Files, command, environment and warnings equal those of the golden files."""
    assert golden.written(name, version, shape) == golden.stored(name, version, shape)


def test_no_golden_files_are_left_of_targets_that_are_gone() -> None:
    """Every folder belongs to a case."""
    kept = {tuple(path.relative_to(golden.FOLDER).parts) for path in golden.FOLDER.glob("*/*/*")}

    assert kept == set(golden.cases())
    assert {name for name, _, _ in kept} == set(TARGETS)
