"""Memory limits on a CUDA device, and the allocator's memory apart from that of the process."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from batchwright.driving.foreground import run_tuning
from batchwright.errors import DeviceError
from batchwright.hardware.inventory import find_device
from batchwright.integrations.memory_peaks import PeakMeter
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import Outcome, Phase
from tests.support.factories import mlp_spec, recommendation

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

MIB = 1024**2


def test_a_limit_below_the_context_is_refused_before_the_first_probe() -> None:
    """No context of a card is as small as 50 MiB."""
    request = TuningRequest(spec=mlp_spec(), effective_batch_size=64, device="cuda:0", memory_limit_bytes=50 * MIB)
    with pytest.raises(DeviceError, match=r"50\.00 MiB .*context .*takes at least .*Raise the limit"):
        run_tuning(request)


def test_a_log_of_peaks_has_the_context_apart() -> None:
    """Reserved memory is the allocator's own figure; the share of the limit includes the context."""
    torch.ones(8 * MIB, dtype=torch.uint8, device="cuda:0")
    found = recommendation(limit_bytes=1024 * MIB, device=find_device("cuda:0"))
    assert found.headroom is not None
    headroom = found.headroom.model_copy(update={"context_bytes": 256 * MIB})
    meter = PeakMeter(found.model_copy(update={"headroom": headroom}), nn.Linear(2, 2), torch.device("cuda:0"))
    figures = meter.figures()
    reserved = torch.cuda.max_memory_reserved()
    assert figures["memory/peak_reserved_bytes"] == reserved >= figures["memory/peak_allocated_bytes"] >= 8 * MIB
    assert figures["memory/context_bytes"] == 256 * MIB
    assert figures["memory/peak_fraction"] == (reserved + 256 * MIB) / (1024 * MIB)


def test_a_limit_that_the_context_turns_out_to_take_is_a_device_error() -> None:
    """The probe fails when it starts, with the measured context, and is no out-of-memory error."""
    with ProbeSupervisor(find_device("cuda:0")) as running:
        probe = ProbeRequest(
            spec=mlp_spec(), micro_batch_size=4, samples_per_window=8, device="cuda:0", limit_bytes=50 * MIB
        )
        result = running.run(probe)
    assert (result.outcome, result.phase) == (Outcome.ERROR, Phase.START), result.message
    assert result.error_type == "batchwright.errors.DeviceError"
    taken = re.search(r"\((\d+) bytes\) of it\. Raise the limit", result.message)
    assert taken is not None, result.message
    assert int(taken.group(1)) == result.context_bytes


def test_the_context_is_measured_with_what_a_step_loads() -> None:
    """CUDA loads kernels when they are first used; after the measurement a step adds no more than cuDNN's."""
    program = """
import torch
from torch.nn import functional
from batchwright.hardware.memory_devices.cuda import CudaDevice
from batchwright.hardware.nvml import read_memory
device = CudaDevice(torch.device("cuda:0"))
assert torch.cuda.memory_reserved() == 0
weight = torch.ones(64, 64, 3, 3, device="cuda", requires_grad=True)
image = functional.conv2d(torch.ones(4, 64, 32, 32, device="cuda"), weight)
with torch.autocast("cuda", torch.bfloat16):
    heads = image.flatten(2).transpose(1, 2).unsqueeze(1).bfloat16()
    functional.scaled_dot_product_attention(heads, heads, heads).float().sum().backward()
torch.optim.AdamW([weight]).step()
torch.cuda.synchronize()
torch.cuda.empty_cache()
used = read_memory("cuda:0").used_bytes
print(used - device.other_processes_bytes() - torch.cuda.memory_reserved() - device.context_bytes())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= 64 * MIB
