"""Memory limits on a CUDA device that leave no memory for tensors."""

from __future__ import annotations

import re

import pytest

from tests.support.factories import mlp_spec
from tuner.errors import DeviceError
from tuner.foreground import run_tuning
from tuner.hardware.inventory import find_device
from tuner.probing.supervisor import ProbeSupervisor
from tuner.schemas.requests import ProbeRequest, TuningRequest
from tuner.schemas.results import Outcome, Phase

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

MIB = 1024**2


def test_a_limit_below_the_context_is_refused_before_the_first_probe() -> None:
    """No context of a card is as small as 50 MiB."""
    request = TuningRequest(spec=mlp_spec(), effective_batch_size=64, device="cuda:0", memory_limit_bytes=50 * MIB)
    with pytest.raises(DeviceError, match=r"50\.00 MiB .*context .*takes at least .*Raise the limit"):
        run_tuning(request)


def test_a_limit_that_the_context_turns_out_to_take_is_a_device_error() -> None:
    """The probe fails when it starts, with the measured context, and is no out-of-memory error."""
    with ProbeSupervisor(find_device("cuda:0")) as running:
        probe = ProbeRequest(
            spec=mlp_spec(), micro_batch_size=4, samples_per_window=8, device="cuda:0", limit_bytes=50 * MIB
        )
        result = running.run(probe)
    assert (result.outcome, result.phase) == (Outcome.ERROR, Phase.START), result.message
    assert result.error_type == "tuner.errors.DeviceError"
    taken = re.search(r"\((\d+) bytes\) of it\. Raise the limit", result.message)
    assert taken is not None, result.message
    assert int(taken.group(1)) == result.context_bytes
