"""The translation of errors into problem documents."""

import pytest

from batchwright.errors import BatchwrightError
from batchwright_service.errors import ServiceError
from batchwright_service.problem_mapping import problem_of

_MESSAGE = "size 12 exceeds 8"
_MAPPED_TOGETHER = {
    "training-error": {"TrainingError", "CheckpointError", "DamagedCheckpointError", "NotFiniteError", "PeerError"},
    "host-trouble": {"HostFailureError", "StorageError"},
    "device-error": {"DeviceError", "VirtualGpuError"},
}
"""Classes that share a code: a caller does the same about each of them."""


def _tree(root: type[Exception]) -> list[type[Exception]]:
    """Return the subclasses of ``root`` that this project defines, at any depth."""
    below = [kind for kind in root.__subclasses__() if kind.__module__ == root.__module__]
    return [found for kind in below for found in (kind, *_tree(kind))]


def _raised(kind: type[Exception]) -> Exception:
    """Return an error of this class with a known message, whatever its constructor takes."""
    error = kind.__new__(kind)
    error.args = (_MESSAGE,)
    vars(error).update(
        reason="inexact", problems=[], document="spec", faults=(), count=0, challenge="", retry_after_seconds=1
    )
    return error


@pytest.mark.parametrize("kind", [*_tree(BatchwrightError), *_tree(ServiceError)], ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_message(kind: type[Exception]) -> None:
    """No class of either tree of errors is reported as unexpected, which would lose the message."""
    problem = problem_of(_raised(kind))
    assert problem.detail == _MESSAGE
    assert problem.title


def test_unrelated_errors_of_the_tuner_have_codes_of_their_own() -> None:
    """A caller tells the errors of the tuner apart by their codes."""
    kinds_by_code: dict[str, set[str]] = {}
    for kind in _tree(BatchwrightError):
        kinds_by_code.setdefault(problem_of(_raised(kind)).code, set()).add(kind.__name__)
    shared = {code: kinds for code, kinds in kinds_by_code.items() if len(kinds) > 1}
    assert shared == _MAPPED_TOGETHER


def test_an_unknown_error_does_not_disclose_its_message() -> None:
    """The message of an error outside both trees may hold anything, and stays in the log."""
    problem = problem_of(KeyError("secret"))
    assert problem.code == "internal-error"
    assert "secret" not in problem.detail
