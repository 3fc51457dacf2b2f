"""What we claim about CUDA, seen on a CUDA device. Run by ``make gpu-test``; skipped, and counted, without one."""

import gc
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pynvml
import pytest
import torch

from batchwright.errors import DeviceError, OutOfMemoryError
from batchwright.hardware.inventory import find_device
from batchwright.hardware.memory_devices.cuda import CudaDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.hardware.memory_in_use import memory_in_use
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ProbeRequest, TrainingRequest, TuningRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec
from tests.gpu import RECOVERIES
from tests.support.factories import gpt_spec, mlp_spec, recommendation, resnet_spec
from tests.support.whole_runs import run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

MIB = 1024**2
GIB = 1024**3
FLOAT = 4
LONG_SECONDS = 60.0


@pytest.fixture(scope="module")
def supervisor() -> Iterator[ProbeSupervisor]:
    """A supervisor of the first card."""
    with ProbeSupervisor(find_device("cuda:0")) as running:
        running.start(mlp_spec())
        yield running


def probe(spec: WorkloadSpec, size: int, limit: int | None, window: int = 100_000) -> ProbeRequest:
    """A probe on the first card."""
    return ProbeRequest(spec=spec, micro_batch_size=size, samples_per_window=window, device="cuda:0", limit_bytes=limit)


def tune(supervisor: ProbeSupervisor, spec: WorkloadSpec, limit: int) -> Recommendation:
    """A tuning under ``limit`` bytes, without a margin."""
    request = TuningRequest(
        spec=spec, effective_batch_size=100_000, device="cuda:0", memory_limit_bytes=limit, memory_margin=0.0
    )
    tuning = TuningSession(
        request, supervisor.device, environment=supervisor.environment(), versions=installed_versions()
    )
    while (asked := tuning.next_probe()) is not None:
        tuning.record(supervisor.run(asked))
    return tuning.recommendation(identifier="rec_gpu", created_at=datetime.now(UTC), total_seconds=0.0)


MODELS = {
    "gpt": gpt_spec(
        model={"kind": "reference", "architecture": {"name": "gpt", "layers": 4, "heads": 8, "width": 512}},
        batch={"sequence_length": 512},
        precision="bf16-mixed",
    ),
    "resnet": resnet_spec(
        model={"kind": "reference", "architecture": {"name": "resnet", "width": 64}}, batch={"image_size": 160}
    ),
    "mlp": mlp_spec(
        model={
            "kind": "reference",
            "architecture": {"name": "mlp", "input_features": 256, "hidden_features": 65_536, "hidden_layers": 1},
        }
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_that_of_a_linear_scan(supervisor: ProbeSupervisor, name: str) -> None:
    """Each size from five below to five above the answer, in a fresh process: the last that fits is the answer.

    What the allocator reserves is not strictly monotone to the megabyte, so a scan may find a fit above an OOM; the
    answer's own bracket must hold twice over, and nothing below the answer may fail.
    """
    found = tune(supervisor, MODELS[name], 6 * GIB)
    answer = found.largest_micro_batch_size
    assert answer is not None
    assert answer > 6, "the limit should leave room to scan"
    scan = {size: supervisor.run(probe(MODELS[name], size, 6 * GIB)).outcome for size in range(answer - 5, answer + 6)}
    assert [scan[size] for size in range(answer - 5, answer + 1)] == [Outcome.FIT] * 6, scan
    assert scan[answer + 1] is Outcome.OOM, scan


def test_a_memory_limit_bounds_what_is_reserved(supervisor: ProbeSupervisor) -> None:
    """A large card stands for a small one: peaks stay below the limit, and a smaller limit gives a smaller answer."""
    small, large = (tune(supervisor, MODELS["gpt"], limit * GIB) for limit in (3, 6))
    assert small.largest_micro_batch_size is not None
    assert large.largest_micro_batch_size is not None
    assert small.largest_micro_batch_size < large.largest_micro_batch_size
    for found, limit in ((small, 3 * GIB), (large, 6 * GIB)):
        peaks = [it.peak_reserved_bytes for it in found.evidence.probes if it.outcome is Outcome.FIT]
        assert all(peak is not None and peak < limit for peak in peaks)


def test_a_probe_reports_the_allocators_figures(supervisor: ProbeSupervisor) -> None:
    """Allocated, reserved, context and what others hold, each plausible."""
    result = supervisor.run(probe(MODELS["gpt"], 2, 6 * GIB))
    assert result.outcome is Outcome.FIT, result.message
    assert result.peak_allocated_bytes is not None
    assert result.peak_reserved_bytes is not None
    assert 0 < result.peak_allocated_bytes <= result.peak_reserved_bytes <= 6 * GIB
    assert result.resident_bytes is not None
    assert result.resident_bytes < result.peak_allocated_bytes
    assert result.allocator_retries == 0
    assert result.context_bytes is not None
    assert 50 * MIB < result.context_bytes < 2 * GIB
    assert result.other_processes_bytes is not None


def test_memory_of_a_card_is_divided_into_own_and_others() -> None:
    """Memory of this process and its descendants is own; unknown where NVML has other process ids."""
    held = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    found = memory_in_use(find_device("cuda:0"))
    assert found is not None
    assert held.numel() <= found.used_bytes
    if found.own_bytes is not None:
        assert held.numel() <= found.own_bytes <= found.used_bytes


def test_the_fork_server_has_no_cuda_context(supervisor: ProbeSupervisor) -> None:
    """The server has not opened the driver's memory device, before and after a probe, and NVML does not list it."""
    server = supervisor._server.start()
    supervisor.run(probe(mlp_spec(), 4, None))
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    running = [entry.pid for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    pynvml.nvmlShutdown()
    assert server.process.pid not in running
    opened = [str(path.resolve()) for path in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    assert not [name for name in opened if "nvidia-uvm" in name]


def test_nothing_is_left_on_the_card_after_a_probe(supervisor: ProbeSupervisor) -> None:
    """A probe's memory is back when its result is: the next probe sees no more of others than this one did."""
    first = supervisor.run(probe(MODELS["gpt"], 4, 6 * GIB))
    second = supervisor.run(probe(MODELS["gpt"], 4, 6 * GIB))
    assert first.other_processes_bytes is not None
    assert second.other_processes_bytes is not None
    assert second.other_processes_bytes <= first.other_processes_bytes + 8 * MIB


@pytest.fixture
def card() -> Iterator[CudaDevice]:
    """The card in this process; any limit is taken back in the end."""
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    yield device
    device.lift_limit()
    device.release()


def test_a_real_oom_is_translated_and_recovered_from(card: CudaDevice) -> None:
    """The allocator's own error becomes ours, and the memory can be used again."""
    card.limit(1 * GIB + (card.context_bytes() or 0))
    failure: Exception | None = None
    try:
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
    except RuntimeError as error:
        failure = error
    assert failure is not None
    assert isinstance(card.translate(failure), OutOfMemoryError)
    del failure
    card.release()
    held = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda:0")
    assert held.numel() == 900 * MIB


def _grow(weight: torch.Tensor, layers: int) -> torch.Tensor:
    """A chain whose activations, 4 MiB a layer, are kept for the backward pass."""
    hidden = torch.ones(1024, 1024, device="cuda:0")
    for _ in range(layers):
        hidden = torch.tanh(hidden @ weight)
    return hidden.sum()


class _TakesTooMuch(torch.autograd.Function):
    """Passes its input on; its backward asks for more than the limit."""

    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        """The input itself."""
        del ctx
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        """Out of memory, with the graph's activations alive."""
        del ctx
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
        return gradients[0]


def test_ooms_leave_no_growth(card: CudaDevice) -> None:
    """Recovered outside the except block, an OOM in the backward pass gives everything back, reserved memory too.

    Without the collector, and without a thread that gives up the interpreter before it waits for something: the thread
    of the backward pass drops the failed graph after the error has been raised.
    """
    card.limit(1 * GIB + (card.context_bytes() or 0))
    weight = torch.randn(1024, 1024, device="cuda:0", requires_grad=True)
    held: list[tuple[int, int]] = []
    interval = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(LONG_SECONDS)
    try:
        for _ in range(RECOVERIES):
            with pytest.raises(torch.OutOfMemoryError):
                torch.autograd.backward(_TakesTooMuch.apply(_grow(weight, 64)))  # type: ignore[no-untyped-call]
            weight.grad = None
            card.release()
            held.append((card.used_bytes(), torch.cuda.memory_reserved()))
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
    assert len(set(held)) == 1


def test_a_limit_leaves_room_for_the_context(card: CudaDevice) -> None:
    """What the allocator may reserve is the limit less the context; a limit above the card is what is free on it."""
    context = card.context_bytes()
    assert context is not None
    card.limit(4 * GIB)
    assert card.limit_bytes == 4 * GIB - context
    card.lift_limit()
    card.limit(2 * card.total_bytes(), margin=0.1)
    assert card.limit_bytes is not None
    assert card.limit_bytes <= 0.9 * card.total_bytes()


def test_a_card_that_is_not_there_is_named() -> None:
    """Not an error from deep inside CUDA."""
    with pytest.raises(DeviceError, match="cuda:99"):
        open_device("cuda:99")


def test_a_run_trains_on_the_card(tmp_path: Path) -> None:
    """The training process succeeds in bf16 and fp16 with their accumulation."""
    for precision in ("bf16-mixed", "fp16-mixed"):
        found = recommendation(gpt_spec(precision=precision), 40, 7, limit_bytes=2 * GIB, device=find_device("cuda:0"))
        result = run_to_end(tmp_path / precision, found, TrainingRequest(updates=5))
        assert result.outcome is RunOutcome.SUCCEEDED, result.message
