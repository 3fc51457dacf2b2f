"""The virtual card itself, by the calls of CUDA and NVML: memory, processes, failures. Each test has a host of its own.

Most programs call the libraries by ctypes, which spares them the import of torch.
"""

import subprocess
import sys

import pytest

from batchwright.errors import VirtualGpuError
from batchwright.virtual_gpu.description import (
    AllocationFailure,
    DeviceLost,
    EccError,
    MemoryTaken,
    OtherProcess,
    SlowKernels,
    VirtualGpu,
)
from tests.virtual_gpu.conftest import Host, StartHost

pytestmark = pytest.mark.virtual_gpu

MIB = 1024**2
GIB = 1024**3
CONTEXT = 300 * MIB
"""Of a T4."""
OUT_OF_MEMORY, NOT_INITIALIZED, UNAVAILABLE, NO_DEVICE, ECC = 2, 3, 46, 100, 214

CALLS = """
import ctypes, json, os, sys
cuda = ctypes.CDLL("libcudart.so.13")
MIB, GIB = 1024**2, 1024**3

def malloc(size):
    address = ctypes.c_void_p()
    return cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)), address

def free(address):
    return cuda.cudaFree(address)

def info():
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(available), ctypes.byref(total)) == 0
    return available.value, total.value

def count():
    number = ctypes.c_int()
    return cuda.cudaGetDeviceCount(ctypes.byref(number)), number.value

def launch():
    class Dim3(ctypes.Structure):
        _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]
    cuda.cudaLaunchKernel.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return cuda.cudaLaunchKernel(None, Dim3(1, 1, 1), Dim3(32, 1, 1), None, 0, None)

def wait():
    print("ready", flush=True)
    sys.stdin.readline()
"""
"""The beginning of each program."""


def printed(host: Host, program: str, **variables: str) -> str:
    """Run a program that has to succeed, and return its output."""
    ended = host.run("-c", CALLS + program, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def begin(host: Host, program: str) -> subprocess.Popen[str]:
    """A program that has reached its ``wait()``."""
    process = subprocess.Popen(
        [sys.executable, "-c", CALLS + program],
        env=host.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


# --- memory ---


def test_an_allocation_takes_a_context_and_whole_pages(start_host: StartHost) -> None:
    """The ledger, the process and the driver have the same figures, and freed memory can be used again."""
    host = start_host("T4")
    process = begin(host, "_, a = malloc(1); _, b = malloc(5 * MIB); wait(); print(free(b)); print(info())")
    assert host.session.processes(0) == {process.pid: CONTEXT + 2 * MIB + 6 * MIB}
    assert host.session.used_bytes(0) == CONTEXT + 8 * MIB
    total = host.session.host.gpus[0].total_bytes
    assert process.communicate("\n")[0] == f"0\n({total - CONTEXT - 2 * MIB}, {total})\n"


def test_memory_runs_out(start_host: StartHost) -> None:
    """One byte more than what is free fails, and leaves the rest usable."""
    program = "malloc(1); available, _ = info(); print(malloc(available + 1)[0], malloc(available)[0], malloc(1)[0])"
    assert printed(start_host("T4"), program) == f"{OUT_OF_MEMORY} 0 {OUT_OF_MEMORY}"


def test_a_context_needs_its_memory(start_host: StartHost) -> None:
    """A process that finds less than the context's memory cannot use the card at all."""
    host = start_host("T4")
    host.session.occupy(0, host.session.host.gpus[0].total_bytes - CONTEXT + MIB)
    assert printed(host, "print(cuda.cudaSetDevice(0))") == str(OUT_OF_MEMORY)


def test_a_killed_process_gives_its_memory_back(start_host: StartHost) -> None:
    """Memory of a process is free when it has ended, in any way."""
    host = start_host("T4")
    process = begin(host, "malloc(GIB); wait()")
    assert host.session.used_bytes(0) == CONTEXT + GIB
    process.kill()
    process.communicate()
    assert host.session.processes(0) == {}
    assert printed(host, "malloc(1); print(info()[0])") == str(
        host.session.host.gpus[0].total_bytes - CONTEXT - 2 * MIB
    )


def test_processes_share_a_card(start_host: StartHost) -> None:
    """Memory that one process holds is not free for another."""
    host = start_host("T4")
    process = begin(host, "malloc(12 * GIB); wait()")
    assert printed(host, "print(malloc(3 * GIB)[0], malloc(GIB)[0])") == f"{OUT_OF_MEMORY} 0"
    process.communicate("\n")


def test_sessions_share_nothing(start_host: StartHost) -> None:
    """Two hosts at the same time, each with its own card of the same kind."""
    first, second = start_host("T4"), start_host("T4")
    process = begin(first, "malloc(12 * GIB); wait()")
    assert second.session.used_bytes(0) == 0
    assert printed(second, "print(malloc(12 * GIB)[0])") == "0"
    process.communicate("\n")


def test_a_session_leaves_nothing(start_host: StartHost) -> None:
    """Its folder is removed, and a process with its environment has no card."""
    host = start_host("T4")
    environment, folder = host.session.environment(), host.session.folder
    host.session.close()
    assert not folder.exists()
    ended = subprocess.run(
        [sys.executable, "-c", CALLS + "print(count())"], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == f"({NO_DEVICE}, 0)"
    assert "the session has ended" in ended.stderr


def test_programs_that_follow_each_other_in_a_process_start_anew(start_host: StartHost) -> None:
    """Memory that a program held before an exec is free."""
    program = "malloc(12 * GIB); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    host = start_host("T4")
    ended = host.run("-c", CALLS + program, CALLS + "print(malloc(12 * GIB)[0])")
    assert ended.stdout.strip() == "0", ended.stderr


def test_memory_holds_what_is_copied_to_it(start_host: StartHost) -> None:
    """Also in the middle of an allocation; fresh memory, and memory set to zero, is zero."""
    program = """
_, a = malloc(4 * MIB)
source, target = ctypes.create_string_buffer(b"abc"), ctypes.create_string_buffer(4)
inside = ctypes.c_void_p(a.value + 3 * MIB)
cuda.cudaMemcpy(target, inside, 4, 4); print(target.raw)
cuda.cudaMemcpy(inside, source, 4, 4); cuda.cudaMemcpy(target, inside, 4, 4); print(target.raw)
cuda.cudaMemset(a, 0, ctypes.c_size_t(4 * MIB)); cuda.cudaMemcpy(target, inside, 4, 4); print(target.raw)
"""
    zero = repr(bytes(4))
    assert printed(start_host("T4"), program).splitlines() == [zero, repr(b"abc\0"), zero]


def test_copies_beyond_the_hosts_memory_are_left_out(start_host: StartHost) -> None:
    """A large card does not take the memory of this host; the log says so."""
    host = start_host("T4", host_memory_bytes=MIB)
    program = """
_, a = malloc(4 * MIB)
source, target = ctypes.create_string_buffer(b"x" * 2 * MIB), ctypes.create_string_buffer(1)
print(cuda.cudaMemcpy(a, source, ctypes.c_size_t(2 * MIB), 4)); cuda.cudaMemcpy(target, a, 1, 4); print(target.raw)
cuda.cudaMemcpy(a, source, ctypes.c_size_t(MIB), 4); cuda.cudaMemcpy(target, a, 1, 4); print(target.raw)
"""
    assert printed(host, program).splitlines() == ["0", repr(b"\0"), repr(b"x")]
    assert "left out a copy or fill" in host.session.log()


# --- torch on it ---


def test_torchs_out_of_memory_error_has_the_cards_figures(start_host: StartHost) -> None:
    """Its allocator's own text, with the other process that NVML lists."""
    host = start_host("T4", processes=[OtherProcess(used_bytes=4 * GIB)])
    other = next(iter(host.session.processes(0)))
    program = """
import torch
held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
try:
    torch.empty(11 * GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""
    text = printed(host, program)
    assert text.startswith("CUDA out of memory. Tried to allocate 11.00 GiB. GPU 0 has a total capacity of 14.56 GiB")
    assert f"Process {other} has 4.00 GiB memory in use" in text
    assert "this process has 1.29 GiB memory in use. Of the allocated memory 1024.00 MiB is allocated" in text


def test_nvml_and_cuda_agree(start_host: StartHost) -> None:
    """Free memory is one figure; NVML's total has the driver's reserve, which its second version names."""
    program = """
import pynvml, torch
held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
first, second = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
available, total = torch.cuda.mem_get_info()
assert first.free == second.free == available
assert total == torch.cuda.get_device_properties(0).total_memory == second.total - second.reserved
assert first.total == second.total == second.reserved + second.used + second.free
assert first.used == second.used + second.reserved
listed = {entry.pid: entry.usedGpuMemory for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
assert listed[os.getpid()] == 300 * MIB + GIB and sum(listed.values()) == second.used
assert "GPU-" + str(torch.cuda.get_device_properties(0).uuid) == pynvml.nvmlDeviceGetUUID(handle)
print(second.total // MIB, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
"""
    host = start_host("T4", processes=[OtherProcess(used_bytes=GIB)])
    assert printed(host, program) == "15360 Tesla T4 (7, 5)"


@pytest.mark.parametrize("expandable", [False, True])
def test_the_ledger_follows_torchs_allocator(start_host: StartHost, expandable: bool) -> None:  # noqa: FBT001 - pytest's
    """Reserved memory and the context are what the driver says is used, with segments that grow by mapping too."""
    program = """
import torch
def used():
    available, total = torch.cuda.mem_get_info()
    return total - available - 300 * MIB
for size in (1, 3, 30, 300, 1000):
    held = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
    assert used() == torch.cuda.memory_reserved(), (used(), torch.cuda.memory_reserved())
kept = torch.empty(100, device="cuda")
del held
torch.cuda.empty_cache()
assert used() == torch.cuda.memory_reserved() == (20 if kept.numel() > 1 << 20 else 2) * MIB
held = torch.empty(14 * GIB, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_stats()["num_ooms"])
"""
    setting = f"expandable_segments:{expandable}"
    assert printed(start_host("T4"), program, PYTORCH_ALLOC_CONF=setting) == "0"


def test_torchs_networks_find_what_they_ask_of_cudnn(start_host: StartHost) -> None:
    """Recurrent ones (their weights are views of one buffer), convolutions, norms, and cuDNN's attention."""
    program = """
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
for options in ({}, {"bias": False}, {"proj_size": 5}, {"bidirectional": True, "num_layers": 3}):
    lstm = nn.LSTM(10, 20, **options).cuda()
    lstm(torch.randn(7, 3, 10, device="cuda"))[0].sum().backward()
    assert all(weight.grad.shape == weight.shape for weight in lstm.parameters())
images = torch.randn(2, 3, 16, 16, device="cuda")
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)).cuda()
network(images).sum().backward()
query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
print(query.grad.shape)
"""
    assert printed(start_host("H100-80GB"), program) == "torch.Size([2, 4, 128, 64])"


@pytest.mark.parametrize("card", ["T4", "A10G", "L4", "H100-80GB"])
def test_torchs_sorts_find_the_code_of_the_card(start_host: StartHost, card: str) -> None:
    """CUB looks for the architecture whose code runs: on an L4, of capability 8.9, that is 8.6."""
    program = """
import torch
assert torch.cuda.get_arch_list() == ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
indices = torch.zeros(40_000, dtype=torch.int64, device="cuda")
torch.sort(indices)
found = torch.ops.aten.embedding_dense_backward(torch.zeros(40_000, 8, device="cuda"), indices, 32, -1, False)
torch.cuda.synchronize()
print(found.shape)
"""
    assert printed(start_host(card), program) == "torch.Size([32, 8])"


# --- devices ---


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", ["Tesla T4"]), ("1", ["NVIDIA A10G"]), ("1,0", ["NVIDIA A10G", "Tesla T4"]), ("1,7,0", ["NVIDIA A10G"])],
)
def test_cuda_visible_devices_selects(start_host: StartHost, visible: str, expected: list[str]) -> None:
    """In its order, and up to the first that is not there; NVML lists all."""
    program = """
import pynvml, torch
pynvml.nvmlInit()
print(json.dumps([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]))
print(pynvml.nvmlDeviceGetCount())
"""
    shown, count = printed(start_host("T4", "A10G"), program, CUDA_VISIBLE_DEVICES=visible).splitlines()
    assert shown == str(expected).replace("'", '"')
    assert count == "2"


def test_cuda_visible_devices_may_be_empty(start_host: StartHost) -> None:
    """No card is an error of CUDA, none of NVML."""
    program = "nvml = ctypes.CDLL('libnvidia-ml.so.1'); print(count(), nvml.nvmlInit_v2())"
    assert printed(start_host("T4"), program, CUDA_VISIBLE_DEVICES="") == f"({NO_DEVICE}, 0) 0"


def test_a_card_may_be_chosen_by_its_uuid(start_host: StartHost) -> None:
    """By the beginning of what NVML reports."""
    host = start_host("T4", "A10G")
    program = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)))
"""
    uuid = printed(host, program)
    program = "malloc(GIB); wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", CALLS + program],
        env=host.environment(CUDA_VISIBLE_DEVICES=uuid[:12]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert list(host.session.processes(1)) == [process.pid]
    assert host.session.used_bytes(0) == 0
    process.communicate("\n")


def test_a_described_card_is_what_torch_sees(start_host: StartHost) -> None:
    """Any size, any limits."""
    figures = VirtualGpu.of("H100-80GB").model_dump() | {"name": "Small H100", "total_bytes": 3 * GIB}
    host = start_host(VirtualGpu.model_validate(figures | {"multiprocessors": 7, "l2_cache_bytes": MIB}))
    program = """
import torch
found = torch.cuda.get_device_properties(0)
print([found.name, found.total_memory, found.multi_processor_count, found.L2_cache_size, (found.major, found.minor)])
print(found.max_threads_per_multi_processor, found.shared_memory_per_block_optin, found.warp_size)
"""
    first, second = printed(host, program).splitlines()
    assert first == f"['Small H100', {3 * GIB}, 7, {MIB}, (9, 0)]"
    assert second == f"2048 {227 * 1024} 32"


# --- forks ---


def test_a_fork_of_a_process_that_uses_cuda_cannot_use_it(start_host: StartHost) -> None:
    """Every call in the child fails as with the real driver, and the parent goes on."""
    program = """
count()
child = os.fork()
if child == 0:
    os._exit(10 * malloc(1)[0] + cuda.cudaFree(None))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, malloc(1)[0])
"""
    assert printed(start_host("T4"), program) == f"{11 * NOT_INITIALIZED} 0"


def test_a_fork_before_the_first_call_can_use_the_card(start_host: StartHost) -> None:
    """Forked children of a parent without a context can use the card, as probes do."""
    program = """
nvml = ctypes.CDLL("libnvidia-ml.so.1"); nvml.nvmlInit_v2()
child = os.fork()
if child == 0:
    os._exit(malloc(1)[0])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), malloc(1)[0])
"""
    assert printed(start_host("T4"), program) == "0 0"


# --- failures ---


def test_the_nth_allocation_fails_once(start_host: StartHost) -> None:
    """Counted from the injection, over all processes; the context is no allocation."""
    host = start_host("T4", failures=[AllocationFailure(at_allocation=3)])
    assert printed(host, "print([malloc(1)[0] for _ in range(2)])") == "[0, 0]"
    assert printed(host, "print([malloc(1)[0] for _ in range(2)])") == f"[{OUT_OF_MEMORY}, 0]"


def test_allocations_fail_from_the_nth_on_until_the_failure_is_cleared(start_host: StartHost) -> None:
    """A lasting failure is torch's out-of-memory error, a single one is a retry."""
    host = start_host("T4", failures=[AllocationFailure(at_allocation=2)])
    program = """
import torch
held = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
print(torch.cuda.memory_stats()["num_alloc_retries"])
"""
    assert printed(host, program) == "1"
    host.session.inject(AllocationFailure(at_allocation=2, lasting=True))
    ended = host.run("-c", CALLS + program)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 MiB" in ended.stderr
    host.session.clear_failures(0)
    assert printed(host, program) == "0"


def test_another_process_takes_memory_in_the_middle(start_host: StartHost) -> None:
    """All that is free if it wants more; it can be ended again."""
    host = start_host("T4", failures=[MemoryTaken(at_allocation=2, taken_bytes=10 * GIB)])
    assert printed(host, "print([malloc(3 * GIB)[0] for _ in range(3)])") == f"[0, {OUT_OF_MEMORY}, {OUT_OF_MEMORY}]"
    (pid,) = host.session.processes(0)
    assert host.session.used_bytes(0) == 10 * GIB
    host.session.free(pid)
    assert host.session.used_bytes(0) == 0
    host.session.inject(MemoryTaken(taken_bytes=100 * GIB))
    assert host.session.used_bytes(0) == host.session.host.gpus[0].total_bytes


def test_more_than_is_free_cannot_be_occupied(start_host: StartHost) -> None:
    """The error has both figures."""
    host = start_host("T4")
    with pytest.raises(VirtualGpuError, match=r"GPU 0 has 14.56 GiB free: no process can take 20.00 GiB"):
        host.session.occupy(0, 20 * GIB)
    with pytest.raises(VirtualGpuError, match="no process outside of the session has the number 5"):
        host.session.free(5)
    with pytest.raises(VirtualGpuError, match="there is no GPU 1: the host has 1"):
        host.session.used_bytes(1)


def test_a_lost_card_answers_neither_cuda_nor_nvml(start_host: StartHost) -> None:
    """The other card goes on."""
    host = start_host("T4", "T4")
    program = """
import pynvml, torch
held = [torch.empty(1, device=f"cuda:{index}") for index in range(2)]
wait()
for index in range(2):
    try:
        torch.cuda.synchronize(index)
        print("works")
    except torch.AcceleratorError as error:
        print(str(error).splitlines()[0])
pynvml.nvmlInit()
try:
    pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1))
except pynvml.NVMLError as error:
    print(error)
"""
    process = begin(host, program)
    host.session.inject(DeviceLost(gpu=1))
    assert process.communicate("\n")[0].splitlines() == [
        "works",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "GPU is lost",
    ]
    assert printed(host, "print(cuda.cudaSetDevice(1), cuda.cudaSetDevice(0))") == f"{UNAVAILABLE} 0"


def test_an_ecc_error_ends_the_processes_on_the_card(start_host: StartHost) -> None:
    """Every call of theirs fails from then on; later processes work."""
    host = start_host("T4")
    program = "malloc(1); wait(); print(malloc(1)[0], cuda.cudaDeviceSynchronize(), launch())"
    process = begin(host, program)
    host.session.inject(EccError())
    assert process.communicate("\n")[0].strip() == f"{ECC} {ECC} {ECC}"
    assert printed(host, "print(malloc(1)[0])") == "0"


def test_an_ecc_error_may_come_with_an_allocation(start_host: StartHost) -> None:
    """Torch names it, and it is no lack of memory."""
    host = start_host("T4", failures=[EccError(at_allocation=2)])
    program = "import torch\nheld = [torch.empty(30 * MIB, dtype=torch.uint8, device='cuda') for _ in range(2)]"
    ended = host.run("-c", CALLS + program)
    assert ended.returncode != 0
    assert "CUDA error: uncorrectable ECC error encountered" in ended.stderr
    assert "OutOfMemoryError" not in ended.stderr


def test_slow_kernels_pause_each_launch(start_host: StartHost) -> None:
    """At least as long as described, until the pause is taken back."""
    host = start_host("T4", failures=[SlowKernels(seconds=0.05)])
    program = """
import time
launch(); begin = time.monotonic(); results = [launch() for _ in range(4)]
print(results, time.monotonic() - begin >= 0.2)
"""
    assert printed(host, program) == "[0, 0, 0, 0] True"


# --- launches ---


def test_a_launch_that_no_card_takes_is_refused(start_host: StartHost) -> None:
    """More threads than a block may have, a grid of no blocks, more shared memory than a block may have."""
    program = """
class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]
cuda.cudaLaunchKernel.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
def call(grid, block, shared):
    return cuda.cudaLaunchKernel(None, Dim3(*grid), Dim3(*block), None, shared, None)
print(call((1, 1, 1), (1024, 1, 1), 64 * 1024), call((1, 1, 1), (1025, 1, 1), 0), call((0, 1, 1), (32, 1, 1), 0),
      call((1, 65536, 1), (32, 1, 1), 0), call((1, 1, 1), (32, 1, 1), 65 * 1024))
"""
    assert printed(start_host("T4"), program) == "0 9 9 9 1"


def test_small_fills_are_computed_without_the_computation_of_operators(start_host: StartHost) -> None:
    """Counters and scales hold what they should."""
    program = """
import torch
print(torch.full((3,), 2.5, device="cuda").cpu().tolist(), torch.full((), 65536.0, device="cuda").item())
print(torch.full((5,), 7, dtype=torch.int64, device="cuda").cpu().tolist(), torch.ones(2, device="cuda").half().dtype)
"""
    host = start_host("T4", compute_limit_bytes=0)
    assert printed(host, program).splitlines() == ["[2.5, 2.5, 2.5] 65536.0", "[7, 7, 7, 7, 7] torch.float16"]


# --- the command ---


def test_a_command_runs_in_a_session_of_its_own(start_host: StartHost) -> None:
    """Its exit status is the command's."""
    host = start_host("T4")
    program = CALLS + "print(count()); sys.exit(7)"
    ended = host.run(
        "-m", "batchwright.virtual_gpu", "--gpu", "T4", "--gpu", "A10G", "--", sys.executable, "-c", program
    )
    assert (ended.returncode, ended.stdout) == (7, "(0, 2)\n"), ended.stderr
