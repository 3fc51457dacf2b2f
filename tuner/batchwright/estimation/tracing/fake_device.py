"""Stand-ins in a traced run: a memory device without memory, CUDA's functions and kernels, and Mamba's recurrence."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from importlib.resources import files
from importlib.util import find_spec
from math import ceil
from types import FrameType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from batchwright.errors import BatchwrightError
from batchwright.estimation.trace import COMPILED_NOTE
from batchwright.estimation.tracing.known_values import KnownValues
from batchwright.estimation.tracing.recorder import Recorder
from batchwright.hardware.gpu_table import GPUS, threads_per_multiprocessor
from batchwright.hardware.memory_devices.base import MemoryDevice, Peaks
from batchwright.schemas.gpus import Gpu
from batchwright.torch_internals import operators_with_kernel
from batchwright.training.micro_batches import forward_state

_RANDOM_STATE_BYTES = 16
"""Philox's seed and offset, as ``torch.cuda.get_rng_state`` returns them."""
_NAME = "a card of a trace"
_DROPOUT_INDEX = 4
"""Index among the arguments of attention: query, key, value, mask, dropout."""
_SCAN = "mamba_selective_scan"
"""The function of ``transformers.models.mamba.modeling_mamba`` and of models with the same layers (FalconMamba, Jamba,
Zamba), as of transformers 5.23."""
_MATCHING = "linear_sum_assignment"
"""The function of ``scipy.optimize``, which other modules import by its name."""
_GROUPS = 32
"""Groups that a sequence is divided into: more take longer to trace, fewer hold more in the backward pass."""


class FakeDevice(MemoryDevice):
    """A device without limits or counters: a trace may allocate any amount."""

    def translate(self, error: Exception) -> BatchwrightError | None:
        """Return None: no error in a trace is a lack of device memory."""
        del error
        return None

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        del margin
        return limit_bytes

    def _set_limit(self, limit_bytes: int) -> None: ...

    def _lift_limit(self) -> None: ...

    def total_bytes(self) -> int:
        """Return 0: unknown."""
        return 0

    def used_bytes(self) -> int:
        """Return 0: unknown."""
        return 0

    def peaks(self) -> Peaks:
        """Return no peaks."""
        return Peaks()

    def reset_peaks(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def other_processes_bytes(self) -> int | None:
        """Return None: unknown."""
        return None

    def context_bytes(self) -> int | None:
        """Return None: unknown."""
        return None


class _IdleStream:
    """A stream or an event of an idle device: every operation returns at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, *_: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        """Return an event that has completed."""
        return event or _IdleStream()

    def wait(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True


def operators_whole_on_cuda() -> set[str]:
    """Return the operators that are one kernel on CUDA, and a composition of others where that kernel is missing.

    Read from the table that torch is generated from, in which an operator may leave its kernels to another
    (``structured_delegate``). The installed torch has the table, but only a CUDA build has the kernels.
    """
    table = files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml").read_text()
    entries = {entry[: entry.index("(")]: entry for entry in re.split(r"^- func: ", table, flags=re.MULTILINE)[1:]}

    def keys(name: str) -> set[str]:
        return {key for line in re.findall(r"^    ([\w, ]+):", entries[name], re.MULTILINE) for key in line.split(", ")}

    return {
        f"aten::{name}"
        for name, entry in entries.items()
        if "CompositeImplicitAutograd" in keys(name)
        and any("CUDA" in keys(owner) for owner in (name, *re.findall(r"structured_delegate: (\S+)", entry)))
    }


@cache
def complete_cuda_kernels() -> Any:  # noqa: ANN401 - torch.library.Library, which has no types
    """Register the missing CUDA kernels of ``operators_whole_on_cuda`` in this process, which keeps the result.

    Without a kernel, torch decomposes such an operator before a dispatch mode sees it, and the trace has temporaries
    and activations that no card allocates. Fake tensors never reach the kernels: the dispatch mode handles them.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in sorted(operators_whole_on_cuda() - set(operators_with_kernel("CUDA"))):
        library.impl(name.removeprefix("aten::"), _not_computed, "CUDA")  # type: ignore[no-untyped-call]
    return library


def _not_computed(*_args: object, **_options: object) -> None:
    raise NotImplementedError("a stand-in for CUDA computes nothing")


def _is_importing() -> bool:
    """Return whether a module is being imported: libraries look for torch's own CUDA then (bitsandbytes)."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the stack of this thread
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _cards(capability: tuple[int, int]) -> Sequence[Gpu]:
    """Return the cards of a compute capability, or all: a trace is of all of them, and answers for the largest."""
    return [gpu for gpu in GPUS if gpu.compute_capability == capability] or GPUS


def _most_memory_bytes(capability: tuple[int, int]) -> int:
    return max(gpu.total_bytes for gpu in _cards(capability))


class _CudaTensorType(type):
    """A class such as ``torch.cuda.FloatTensor``, which a build of torch for the CPU has no tensors of."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: object) -> Tensor:  # noqa: ANN401 - sizes, or values
        """Make a tensor of values, or one of a shape."""
        if all(isinstance(size, int) for size in args):
            return torch.empty(*args, dtype=cls.dtype, device="cuda")
        return torch.as_tensor(args[0]).to(device="cuda", dtype=cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def _tensor_types() -> Iterator[tuple[str, type]]:
    """Yield the names and stand-ins of CUDA's classes of tensors. ``Tensor.type`` reads the name of a class."""
    for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        kind = f"{name}Tensor"
        yield kind, _CudaTensorType(f"torch.cuda.{kind}", (), {"dtype": getattr(torch, kind).dtype})


@contextmanager
def emulate_cuda(compute_capability: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Make the queries of ``torch.cuda`` return those of an idle GPU during the block.

    Nothing is computed. Workloads choose devices and kernels by ``is_available()`` and by the capability. It is False
    for modules that are imported meanwhile, which would look for a CUDA build.
    """

    def properties(*_: object) -> SimpleNamespace:
        capability = compute_capability()
        major, minor = capability
        threads = max(gpu.resident_threads or 1 for gpu in _cards(capability))
        return SimpleNamespace(
            name=_NAME,
            major=major,
            minor=minor,
            total_memory=_most_memory_bytes(capability),
            multi_processor_count=ceil(threads / threads_per_multiprocessor(capability)),
        )

    def idle(*_: object, **__: object) -> None: ...

    replacements: dict[str, Callable[..., Any]] = {
        "_lazy_init": idle,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "is_available": lambda: not _is_importing(),
        "current_device": lambda: 0,
        "set_device": idle,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: compute_capability(),
        "get_device_name": lambda *_: _NAME,
        "get_device_properties": properties,
        "mem_get_info": lambda *_: (_most_memory_bytes(compute_capability()),) * 2,
        "memory_summary": lambda *_, **__: "",
        "reset_peak_memory_stats": idle,
        "reset_max_memory_allocated": idle,
        "set_per_process_memory_fraction": idle,
        "ipc_collect": idle,
        "get_rng_state": lambda *_: torch.zeros(_RANDOM_STATE_BYTES, dtype=torch.uint8),
        "is_bf16_supported": lambda *_, **__: True,  # as torch returns for every GPU: older ones emulate bf16
        "set_rng_state": idle,
        "synchronize": idle,
        "Stream": _IdleStream,
        "Event": _IdleStream,
        "current_stream": lambda *_: _IdleStream(),
        "default_stream": lambda *_: _IdleStream(),
        "stream": lambda *_: nullcontext(),
        "empty_cache": idle,
        "is_current_stream_capturing": lambda: False,
        **dict(_tensor_types()),
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        for name in ("mark", "range_start", "range_end", "range_push", "range_pop"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: 0))
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        yield


class _Generator(torch.Generator):
    """A generator of any device, whose state is the host's: fake tensors draw from such."""

    def __new__(cls, device: torch.device | str = "cpu") -> Self:
        """Make one without the libraries of the device."""
        made = super().__new__(cls)
        vars(made)["device"] = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override] # torch declares an attribute
        """The device that was named."""
        found: torch.device = vars(self)["device"]
        return found


def left_uncompiled(notes: set[str], model: Any = None, **options: Any) -> Any:  # noqa: ANN401 - as torch.compile
    """Stand in for ``torch.compile``, of a module or a function or as a decorator, and leave it as written.

    A function counts as compiled once it is called: libraries compile functions while they are imported.
    """
    if model is None:
        return partial(left_uncompiled, notes, **options)
    if isinstance(model, nn.Module):
        notes.add(COMPILED_NOTE)
        return model

    def uncompiled(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function's
        notes.add(COMPILED_NOTE)
        return model(*args, **kwargs)

    return wraps(model)(uncompiled)


@contextmanager
def without_dropout_in_attention() -> Iterator[None]:
    """Disable the dropout of attention, and no other dropout, during the block.

    With dropout the CPU's only kernel allocates the matrix of all pairs of tokens; a GPU's kernels only keep a seed.
    """
    attention: Callable[..., Tensor] = nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - the signature of the original
        positional = args[:_DROPOUT_INDEX] + (0.0,) * (len(args) > _DROPOUT_INDEX) + args[_DROPOUT_INDEX + 1 :]
        return attention(*positional, **{name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()})

    with patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


@contextmanager
def answers_without_values(values: KnownValues) -> Iterator[None]:
    """Answer two questions whose answers depend on unknown values in a run, during the block.

    The engine finds the parameters that a forward pass changes, such as a teacher's, by their norms: here by the writes
    to them. Losses of detection match predictions with boxes by ``linear_sum_assignment`` of SciPy: here in order, as
    the number of pairs is the same.
    """
    norms = forward_state.norms_of

    def written(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
        return {name: str(values.content_of(parameters[name])) for name in norms(parameters)}

    def matched(original: Callable[..., Any], costs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as SciPy's
        if not isinstance(costs, Tensor) or values.value_of(costs) is not None:
            return original(costs, *args, **kwargs)
        values.stand_ins.add("whole numbers")
        return (np.arange(min(costs.shape)),) * 2

    with ExitStack() as stack:
        stack.enter_context(patch.object(forward_state, "norms_of", written))
        for module in [each for each in sys.modules.values() if _MATCHING in getattr(each, "__dict__", ())]:
            original = vars(module)[_MATCHING]
            stack.enter_context(patch.object(module, _MATCHING, partial(matched, original)))
        yield


@contextmanager
def grouped_scans(recorder: Recorder) -> Iterator[None]:
    """Trace the recurrence of Mamba in groups of steps during the block, in the models that are imported.

    Without Mamba's kernels, transformers runs a dozen operators per token. A trace needs the sizes of blocks, not their
    values, so a group of steps is traced as one step with as much more memory. The states that a step leaves for the
    backward pass are recorded as a block per step, as in a run; its outputs, a hundredth of them, as a block per group.
    What the backward pass of a group holds for a moment is larger than that of a step, by a thirtieth of one tensor of
    all steps.
    """
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and _SCAN in vars(module):
                original = getattr(module, _SCAN)
                stack.enter_context(patch.object(module, _SCAN, partial(_scan, recorder, original)))
        yield


def _scan(  # noqa: PLR0913, PLR0917 - the signature and the names of the original, after the first two
    recorder: Recorder,
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor,  # noqa: N803
    z: Tensor,
    delta_bias: Tensor,
    **more: object,
) -> Tensor:
    """Scan as the original does without kernels: the layers' training call. Other calls go to the original."""
    if more.get("return_last_state") or (more.get("use_mambapy") and find_spec("mambapy")):
        return original(hidden_states, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, **more)
    dt = torch.nn.functional.softplus(dt + delta_bias.to(dt.dtype)[..., None])
    B, C = B.transpose(1, 2), C.transpose(1, 2)  # noqa: N806
    decay = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    discrete_b = dt[:, :, :, None] * B[:, None, :, :].float()
    inputs = discrete_b * hidden_states[:, :, :, None].float()
    output = _recurrence(recorder, decay, inputs, C, hidden_states.dtype)
    output = output + hidden_states * D[None, :, None]
    return output * torch.nn.functional.silu(z)


def _recurrence(recorder: Recorder, decay: Tensor, inputs: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(n, d, length)`` outputs of the recurrence ``state = decay * state + input; output = state @ out``.

    Args:
        recorder: records the blocks of the steps.
        decay: ``(n, d, length, s)``.
        inputs: as ``decay``.
        out: ``(n, length, s)``.
        dtype: the type of the outputs.
    """
    samples, width, length, size = decay.shape
    state = torch.zeros(samples, width, 1, size, dtype=dtype, device=decay.device)
    outputs = []
    for first, steps in _groups(length):
        product = decay[:, :, first : first + steps] * state
        recorder.divide(product, steps, kept=1)
        state = product + inputs[:, :, first : first + steps]
        recorder.divide(state, steps, kept=steps)
        del product
        narrow = state.to(dtype)
        recorder.divide(narrow, steps, kept=steps)
        output = torch.matmul(narrow.reshape(samples, width * steps, size), out[:, first, :].unsqueeze(-1))
        outputs.append(output.view(samples, width, steps))
    return torch.cat(outputs, dim=-1)


def _groups(length: int) -> Iterator[tuple[int, int]]:
    """Yield the first step and the number of steps of each group: single steps until the rest divides evenly."""
    steps = max(1, length // _GROUPS)
    single = length % steps
    for first in range(single):
        yield first, 1
    for first in range(single, length, steps):
        yield first, steps
