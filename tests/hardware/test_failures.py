"""Classification of failures: the table of known messages."""

import pytest
import torch

from batchwright.errors import OutOfMemoryError
from batchwright.hardware.failures import FailureKind, classify_exception, oom_in_words, printed_error

OOM, SUSPECTED, INVALID, OTHER = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.SUSPECTED_OUT_OF_MEMORY,
    FailureKind.INVALID_SIZE,
    FailureKind.OTHER,
)
DEVICE = FailureKind.DEVICE_FAILURE


class OutOfResources(Exception):  # noqa: N818 - Triton's name for it
    """Stand-in for triton.runtime.errors.OutOfResources, by its name."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OOM),
        (torch.cuda.OutOfMemoryError("whatever it says"), OOM),
        (MemoryError(), OOM),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), OOM),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), OOM),
        (RuntimeError("HIP out of memory. Tried to allocate"), OOM),
        (RuntimeError("XPU out of memory. Tried to allocate"), OOM),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), OOM),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
            OOM,
        ),
        (RuntimeError("Allocation is out of device memory on current platform."), OOM),
        (RuntimeError("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OOM),
        (RuntimeError("cudaErrorMemoryAllocation"), OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), SUSPECTED),
        (RuntimeError("GET was unable to find an engine to execute this computation"), SUSPECTED),
        (RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"), SUSPECTED),
        (RuntimeError("could not create a primitive"), SUSPECTED),
        (RuntimeError("could not execute a primitive"), SUSPECTED),
        (RuntimeError("CUDA error: invalid configuration argument"), INVALID),
        (RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true"), INVALID),
        (OutOfResources("out of resource: shared memory, Required: 270336, Hardware limit: 232448"), INVALID),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), DEVICE),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), DEVICE),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x6)"), OTHER),
        (RuntimeError("CUDA error: device-side assert triggered"), OTHER),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), OTHER),
        (ValueError("my own check: CUDA out of memory is no excuse"), OTHER),
        (KeyError("out of memory"), OTHER),
        (SystemExit(1), OTHER),
    ],
)
def test_exceptions_are_classified(error: BaseException, kind: FailureKind) -> None:
    """Only errors in the table count as out of memory, or as those of the device."""
    assert classify_exception(error) is kind


def test_a_wrapped_oom_is_found() -> None:
    """The cause of a framework's own error is classified."""
    wrapped = ValueError("step failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert classify_exception(wrapped) is OOM


def test_a_suppressed_context_is_no_evidence() -> None:
    """The context of `raise ... from None` is ignored."""
    error = ValueError("bad label")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    error.__suppress_context__ = True
    assert classify_exception(error) is OTHER


def test_our_own_error_is_not_classified_twice() -> None:
    """A translated error is not classified again."""
    assert classify_exception(OutOfMemoryError("translated")) is OTHER


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes. Error code 12",
            "asked for 2.00 MiB more",
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of", "asked for 20.00 MiB more"),
        ("HIP out of memory. Tried to allocate 1.50 GiB", "asked for 1.50 GiB more"),
        ("CUDA out of memory. Tried to allocate 512 bytes.", "asked for 512 B more"),
        ("std::bad_alloc", "found no more memory"),
        ("memory allocation of 7340032 bytes failed", "asked for 7.00 MiB more"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "found no more memory"),
    ],
)
def test_an_out_of_memory_error_is_summarised(message: str, words: str) -> None:
    """The summary has the size of the failed request, if the message has it."""
    assert oom_in_words(message) == words


_OF_A_RANK = "[rank1]: RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
_OF_A_CONNECTION = "[rank0]: RuntimeError: [../gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:20815"
_OF_TORCHRUN = (
    "Traceback (most recent call last):\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n==="
)
_OF_ACCELERATE = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."


@pytest.mark.parametrize(
    ("lines", "begins", "kind"),
    [
        ([_OF_A_RANK, _OF_A_CONNECTION, _OF_TORCHRUN], "RuntimeError: [enforce fail", OOM),
        (["[default0]:[rank0]: numpy._core._exceptions._ArrayMemoryError: Unable", _OF_TORCHRUN], "numpy", OOM),
        (["MemoryError", _OF_ACCELERATE], "MemoryError", OOM),
        (["terminate called after throwing", "  what():  std::bad_alloc", "W1 sending signal"], "what()", OOM),
        (["(TrainWorker pid=7) KeyError: 'labels'", _OF_ACCELERATE], "KeyError: 'labels'", OTHER),
        (["1: RuntimeError: can't start new thread", _OF_TORCHRUN], "RuntimeError: can't start", SUSPECTED),
        (["OpenBLAS error: Memory allocation still failed after 10 retries, giving up."], "OpenBLAS", OOM),
        (["memory allocation of 7168 bytes failed", "skipping backtrace printing"], "memory allocation", OOM),
        (["ValueError: CUDA out of memory is no excuse"], "ValueError", OTHER),
        ([_OF_TORCHRUN], "torch.distributed.elastic", OTHER),
        (["usage: train.py [--help]", "train.py: no such option"], "train.py: no such", OTHER),
        ([], "", OTHER),
    ],
)
def test_the_error_of_a_rank_comes_before_that_of_its_launcher(
    lines: list[str], begins: str, kind: FailureKind
) -> None:
    """The launcher's own error is the last of the output and says nothing of the cause."""
    line, found = printed_error("\n".join(lines))
    assert line.startswith(begins)
    assert found is kind
