"""Pickling for another process of the same program: functions and classes of a script by value. No torch."""

import hashlib
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

_COMPARED_BYTES = 2**20
"""Larger tensors and arrays are compared by type, shape and device, without a copy of their content."""


class ModulePickler(cloudpickle.Pickler):  # type: ignore[misc] # not typed
    """A pickler of cloudpickle that takes modules for modules.

    ``torch.backends.cudnn`` and ``torch.ops.NAME`` are objects of classes derived from that of modules.
    """

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 - what pickle takes
        """Write such a module by its name."""
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            with suppress(Exception):  # the error of the usual way is clearer
                if resolve_name(obj.__name__) is obj:
                    return resolve_name, (obj.__name__,)
        return super().reducer_override(obj)


@dataclass
class Examined:
    """What pickling an object meets, without its content.

    Attributes:
        references: the functions, classes and modules, of which some are pickled by name.
        digest: of everything that was written.
        size_bytes: as much as the object takes when it is written.
    """

    references: list[FunctionType | type | ModuleType] = field(default_factory=list)
    digest: str = ""
    size_bytes: int = 0


def examine(value: object) -> Examined:
    """Examine an object. Equal ones of two processes have the same digest, but for sets and for objects in cycles.

    Raises:
        Exception: what pickling raises, of any type.
    """
    examining = _Examining(_Digest())
    examining.dump(value)
    examined = examining.examined
    examined.digest = examining.written.sha256.hexdigest()
    examined.size_bytes += examining.written.size_bytes
    return examined


class _Digest:
    """A file that keeps the digest of what is written."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self.sha256.update(data)
        self.size_bytes += len(data)


class _Examining(ModulePickler):
    """Writes to a digest what does not depend on addresses, and notes what it meets."""

    def __init__(self, written: _Digest) -> None:
        super().__init__(written)
        self.written = written
        self.examined = Examined()

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 - what pickle takes
        torch = sys.modules.get("torch")
        if isinstance(obj, (FunctionType, type, ModuleType)):
            self.examined.references.append(obj)
        elif (torch is not None and isinstance(obj, torch.Tensor)) or type(obj).__module__ == "numpy":
            described = self._tensor(obj)
            if described is not None:
                return tuple, (described,)
        return super().reducer_override(obj)

    def _tensor(self, tensor: Any) -> tuple[object, ...] | None:  # noqa: ANN401 - of torch or numpy
        """Describe a tensor or an array by its values, and if it is large or has fractions by its size alone.

        The memory of a program may follow from lengths and indices, but hardly from weights, which random numbers make.
        None for anything else.
        """
        size = getattr(tensor, "nbytes", None)
        if not isinstance(size, int) or not hasattr(tensor, "tolist"):
            return None
        device = str(getattr(tensor, "device", ""))
        described = (type(tensor).__qualname__, str(tensor.dtype), tuple(tensor.shape), device)
        self.examined.size_bytes += size
        has_fractions = math.prod(tensor.shape) > 1 and any(kind in str(tensor.dtype) for kind in ("float", "complex"))
        if size > _COMPARED_BYTES or has_fractions:
            return described
        try:
            return *described, repr(tensor.tolist())
        except Exception:  # noqa: BLE001 - sparse, nested or without storage
            return described
