"""A function that stands before one CUDA kernel: runs it, and then computes its values on the CPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from batchwright.torch_internals import (
    CPU_KEYS,
    DispatchKeySet,
    Kernel,
    TorchFunctionOff,
    is_dense,
    numbers_as_tensors,
    schema_of,
)
from batchwright.virtual_gpu.compute.aliases import alias, mapped, on_cpu, storage_address, tensors_in, write_zeros
from batchwright.virtual_gpu.compute.normalization import NARROW, widened
from batchwright.virtual_gpu.compute.random_numbers import PhiloxState, philox_state
from batchwright.virtual_gpu.compute.substitutes import IN_FLOAT, SUBSTITUTES
from batchwright.virtual_gpu.uncomputed import UncomputedLog

Arguments = tuple[Any, ...]
Options = dict[str, Any]
_TENSOR_TYPES = {"Tensor", "Optional[Tensor]"}
_ZEROED = {"zero_", "_foreach_zero_"}
_FILLED = {"fill_.Scalar", "fill_.Tensor"}


class _ShapeError(Exception):
    """The CPU's result has another shape than the card's."""


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        is_in_kernel: a real kernel runs, whose own calls of operators are not computed: its results will be.
    """

    is_in_kernel = False


_thread = _Thread()


@contextmanager
def _in_kernel() -> Iterator[None]:
    before, _thread.is_in_kernel = _thread.is_in_kernel, True
    try:
        yield
    finally:
        _thread.is_in_kernel = before


class ComputedKernel:
    """Run the real kernel of an operator, and write the values that it would have computed.

    Args:
        operator: the overload, such as ``torch.ops.aten.add.Tensor``.
        real: the kernel that torch has registered.
        limit_bytes: an operator with a larger tensor is left out: its new results are zero, and tensors that it
            changes keep their values.
        log: where operators that are left out are counted.
    """

    def __init__(self, operator: Callable[..., Any], real: Kernel, limit_bytes: int, log: UncomputedLog) -> None:
        self._real = real
        self._limit_bytes = limit_bytes
        self._log = log
        schema = schema_of(operator)
        self._name: str = schema.name
        self._key = key_of(schema)
        self._arguments = schema.arguments
        self._written = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        self._tensors_at = {at for at, one in enumerate(schema.arguments) if str(one.type) in _TENSOR_TYPES}
        self._generator_at = next((at for at, one in enumerate(schema.arguments) if one.name == "generator"), None)
        self._substitute = SUBSTITUTES.get(self._key)

    def __call__(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any operator's
        """Run the operator; ``keys`` are the dispatch keys of this call."""
        if _thread.is_in_kernel:
            return self._call(self._real, keys, args, kwargs)
        state = self._state(args, kwargs)
        with _in_kernel():
            results = self._call(self._real, keys, args, kwargs)
            if any(tensor.is_cuda for tensor in tensors_in((*args, *kwargs.values(), results))):
                with TorchFunctionOff():
                    return self._completed(results, args, kwargs, state)
        return results

    def _call(self, kernel: Kernel, keys: DispatchKeySet, args: Arguments, kwargs: Options) -> Any:  # noqa: ANN401
        """Call a kernel of the operator, and tell it that numbers may stand for tensors, where one does."""
        if any(isinstance(value, int | float | complex) for at, value in enumerate(args) if at in self._tensors_at):
            with numbers_as_tensors():
                return kernel.call_boxed(keys, *args, **kwargs)
        return kernel.call_boxed(keys, *args, **kwargs)

    def _completed(self, results: Any, args: Arguments, kwargs: Options, state: PhiloxState | None) -> Any:  # noqa: ANN401
        """Return the results with their values, or with zeros if they cannot be computed."""
        if not self._is_small(results, args, kwargs):
            self._leave_out(results, args, kwargs)
            return results
        try:
            computed = self._compute(args, kwargs, state)
            if isinstance(results, bool):
                return computed
            _write(results, computed)
        except Exception as error:  # noqa: BLE001 - whatever an operator of the CPU raises, the run goes on
            self._log.add(self._label, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            self._zero_new(results, args, kwargs)
        return results

    @cached_property
    def _cpu_kernel(self) -> Kernel:
        return torch.library.get_kernel(self._label, "CPU")

    @property
    def _label(self) -> str:
        return f"{self._name}{self._key.removeprefix(self._name.partition('::')[2])}"

    def _state(self, args: Arguments, kwargs: Options) -> PhiloxState | None:
        """Return the state of the generator that the real kernel is about to advance; None if it draws nothing."""
        if self._generator_at is None and not (self._substitute and self._substitute.draws):
            return None
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
        if given is None:
            tensors = tensors_in((*args, *kwargs.values()))
            device = next((tensor.get_device() for tensor in tensors if tensor.is_cuda), torch.cuda.current_device())
            given = torch.cuda.default_generators[device]
        return philox_state(given)

    def _is_small(self, results: Any, args: Arguments, kwargs: Options) -> bool:  # noqa: ANN401 - any operator's
        if self._key == "copy_" and not args[0].is_cuda:
            return True  # the host has memory for the copy
        tensors = tensors_in((*args, *kwargs.values(), results))
        return all(tensor.nbytes <= self._limit_bytes for tensor in tensors if tensor.is_cuda)

    def _compute(self, args: Arguments, kwargs: Options, state: PhiloxState | None) -> Any:  # noqa: ANN401 - as above
        cpu_args = tuple(on_cpu(value) for value in args)
        cpu_kwargs = {name: on_cpu(value) for name, value in kwargs.items()}
        if self._substitute is not None:
            first = (state,) if self._substitute.draws else ()
            return self._substitute.function(*first, *cpu_args, **cpu_kwargs)
        if state is not None:
            cpu_args, cpu_kwargs = self._with_generator(cpu_args, cpu_kwargs, state.cpu_generator())
        is_narrow = any(tensor.dtype in NARROW for tensor in tensors_in((*cpu_args, *cpu_kwargs.values())))
        if is_narrow and self._key in IN_FLOAT:
            return self._compute_in_float(cpu_args, cpu_kwargs)
        try:
            return self._call(self._cpu_kernel, CPU_KEYS, cpu_args, cpu_kwargs)
        except (NotImplementedError, RuntimeError):  # the CPU lacks kernels for half and bfloat16
            if not is_narrow:
                raise
        return self._compute_in_float(cpu_args, cpu_kwargs)

    def _compute_in_float(self, args: Arguments, kwargs: Options) -> Any:  # noqa: ANN401 - as above
        """Call the operator on float32 copies of half and bfloat16 tensors, and copy back those that it changes."""
        wide_args = tuple(mapped(value, widened) for value in args)
        wide_kwargs = {name: mapped(value, widened) for name, value in kwargs.items()}
        results = self._call(self._cpu_kernel, CPU_KEYS, wide_args, wide_kwargs)
        changed = zip(self._changed(args, kwargs), self._changed(wide_args, wide_kwargs), strict=True)
        for narrow, wide in changed:
            if narrow is not wide:
                narrow.copy_(wide)
        return results

    def _changed(self, args: Arguments, kwargs: Options) -> Iterator[Tensor]:
        """Yield the tensors among the arguments that the operator writes to."""
        named = chain(zip((argument.name for argument in self._arguments), args, strict=False), kwargs.items())
        return tensors_in(value for name, value in named if name in self._written)

    def _with_generator(
        self, args: Arguments, kwargs: Options, generator: torch.Generator
    ) -> tuple[Arguments, Options]:
        at = self._generator_at
        if at is not None and at < len(args):
            return (*args[:at], generator, *args[at + 1 :]), kwargs
        return args, {**kwargs, "generator": generator}

    def _leave_out(self, results: Any, args: Arguments, kwargs: Options) -> None:  # noqa: ANN401 - any operator's
        """Leave an operator uncomputed, so that what was in the memory before is no number of a loss.

        Memory that the operator would overwrite is zeroed, which is the right value of a large ``zeros``.
        """
        if self._key in _ZEROED or (self._key in _FILLED and not isinstance(args[1], Tensor) and args[1] == 0):
            for tensor in tensors_in(args[:1]):
                write_zeros(tensor)
            return
        if self._key == "copy_" and _is_copied_by_the_runtime(args[0], args[1]):
            return
        self._log.add(self._label, "a tensor is larger than the session computes")
        if self._generator_at is not None or self._key in {*_FILLED, "copy_"}:
            for tensor in self._changed(args, kwargs):
                write_zeros(tensor)
        self._zero_new(results, args, kwargs)

    def _zero_new(self, results: Any, args: Arguments, kwargs: Options) -> None:  # noqa: ANN401 - any operator's
        """Zero the results that the operator has allocated."""
        given = {storage_address(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        for tensor in tensors_in((results,)):
            if storage_address(tensor) not in given:
                write_zeros(tensor)


class DynamicKernel(ComputedKernel):
    """Compute an operator whose values decide the shape of its results, and allocate those then.

    The real kernel would read the shape from memory that no kernel has written.
    """

    def __call__(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any operator's
        """Run the operator, within a real kernel too."""
        del keys
        device = next(tensor.device for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_cuda)
        with TorchFunctionOff(), _in_kernel():
            computed = self._compute(args, kwargs, None)
            return _on_device(computed, device)


def key_of(schema: Any) -> str:  # noqa: ANN401 - the class of schemas is private
    """Return the name of an operator without its namespace, with its overload: ``add.Tensor``."""
    name = schema.name.partition("::")[2]
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def _is_copied_by_the_runtime(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy is one of bytes, which CUDA does without a kernel."""
    same = target.dtype == source.dtype and target.size() == source.size() and target.stride() == source.stride()
    return same and is_dense(target) and target.is_neg() == source.is_neg() and target.is_conj() == source.is_conj()


def _write(results: Any, computed: Any) -> None:  # noqa: ANN401 - results of any operator
    """Write computed values into the card's results, pair by pair."""
    if isinstance(results, list | tuple) and isinstance(computed, list | tuple):
        for result, value in zip(results, computed, strict=False):
            _write(result, value)
    elif isinstance(results, Tensor) and isinstance(computed, Tensor) and results.is_cuda:
        if results.shape != computed.shape:
            raise _ShapeError(f"{tuple(computed.shape)} on the CPU, {tuple(results.shape)} on the card")
        target = alias(results)
        if target.data_ptr() != computed.data_ptr():
            target.copy_(computed)


def _on_device(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - results of any operator
    if isinstance(value, list | tuple):
        return type(value)(_on_device(part, device) for part in value)
    if not isinstance(value, Tensor):
        return value
    result = torch.empty_like(value, device=device)
    alias(result).copy_(value)
    return result
