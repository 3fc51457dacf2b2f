"""The examples run, and print what they claim."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import EXAMPLES


@pytest.mark.thorough
def test_the_own_loop_is_exact_and_the_tutorials_is_not() -> None:
    """In every window, the short last one included, by the errors that `examples/own_loop.py` prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "own_loop.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    wrong = re.findall(r"loss / steps +(\S+)", done.stdout)
    right = re.findall(r"GradientAccumulation +(\S+)", done.stdout)
    assert len(wrong) == len(right) == 2
    assert all(float(error) > 1e-1 for error in wrong)
    assert all(float(error) < 1e-5 for error in right)
