"""The kernels of several profiles in one trace, as far as they decide alike.

A trace follows the first profile. The others differ from it in the bytes of some workspaces, which are recorded for
each profile, or in a decision: which kernel attention takes, or how many workspaces an operator has. A profile that
decides otherwise leaves the trace, and needs one of its own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from batchwright.estimation.trace import BlockBytes
from batchwright.estimation.tracing.kernel_workspaces.device_kernels import CARD_DEPENDENT, CpuKernels, CudaKernels
from batchwright.estimation.tracing.torch_internals import OpOverload
from batchwright.schemas.gpus import KernelProfile

Profile: TypeAlias = "KernelProfile | None"
"""The kernel profile of a GPU; None for the CPU."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class SharedBytes:
    """The bytes of a block that not all profiles share.

    Attributes:
        nbytes: those of the first profile.
        others: those of the profiles that differ.
    """

    nbytes: BlockBytes
    others: Mapping[Profile, BlockBytes]

    def of(self, profile: Profile) -> BlockBytes:
        """Return the bytes of a profile that shares the trace."""
        return self.others.get(profile, self.nbytes)


class _Kernels(Protocol):
    """Workspaces of a device's kernels."""

    has_miopen: bool

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return the workspaces of library handles that ``func`` creates and keeps: names and bytes."""

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[BlockBytes]:
        """Return the workspaces that ``func`` holds while it runs, in bytes."""

    def error(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        """Return by how many bytes the workspace of ``func`` may be smaller, and larger, than ``temporary`` has it."""


class SharedKernels:
    """The kernels of the profiles that share a trace.

    Args:
        profiles: the first one leads; the others share its trace while they decide as it does.

    Attributes:
        errors: for each profile by how many bytes the workspace of a call may be smaller, and larger, than recorded:
            the most of all calls so far.
    """

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self._leader, *self._followers = profiles
        self._kernels: dict[Profile, _Kernels] = {
            profile: CpuKernels() if profile is None else CudaKernels(profile) for profile in profiles
        }
        self.errors: dict[Profile, tuple[int, int]] = dict.fromkeys(profiles, (0, 0))
        self._kept_errors: dict[Profile, dict[int, tuple[int, int]]] = {profile: {} for profile in profiles}

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles that share the trace so far."""
        return (self._leader, *self._followers)

    @property
    def has_miopen(self) -> bool:
        """True if MIOpen runs recurrent layers instead of cuDNN."""
        return self.agreed(lambda profile: self._kernels[profile].has_miopen)

    def agreed(self, decide: Callable[[Any], _T]) -> _T:
        """Return the decision of the first profile; profiles that decide otherwise leave the trace."""
        decision = decide(self._leader)
        self._followers = [profile for profile in self._followers if decide(profile) == decision]
        return decision

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int | SharedBytes]]:
        """Return the workspaces of library handles that ``func`` creates and keeps: names and bytes."""
        if func not in CARD_DEPENDENT:
            return ()
        found = {profile: self._kernels[profile].persistent(func, args) for profile in self.profiles}
        names = self.agreed(lambda profile: [name for name, _ in found[profile]])
        nbytes = self._merged({profile: [nbytes for _, nbytes in pairs] for profile, pairs in found.items()})
        return list(zip(names, nbytes, strict=True))

    def temporary(
        self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]
    ) -> Sequence[BlockBytes | SharedBytes]:
        """Return the workspaces that ``func`` holds while it runs, in bytes."""
        if func not in CARD_DEPENDENT:
            return self._kernels[self._leader].temporary(func, args, outputs)
        return self._merged(
            {profile: self._kernels[profile].temporary(func, args, outputs) for profile in self.profiles}
        )

    def note_error(
        self,
        func: OpOverload,
        args: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        kept: int | None,
        live: Callable[[], Collection[int]],
    ) -> None:
        """Keep the largest error of a call. Errors of blocks that are kept add up while they live.

        Args:
            func: the operator, called with ``args``, with these ``outputs``.
            args: its arguments.
            outputs: its results.
            kept: the block that has the error while it lives; None if the error ends with the call.
            live: returns the blocks that live.
        """
        for profile in self.profiles if func in CARD_DEPENDENT else ():
            error = self._kernels[profile].error(func, args, outputs)
            if any(error):
                known = {block: of for block, of in self._kept_errors[profile].items() if block in live()}
                fewer, more = (sum(part) for part in zip(error, *known.values(), strict=True))
                self.errors[profile] = max(self.errors[profile][0], fewer), max(self.errors[profile][1], more)
                self._kept_errors[profile] = known if kept is None else known | {kept: error}

    def _merged(self, found: Mapping[Profile, Sequence[BlockBytes]]) -> list[Any]:
        """Return the bytes of each workspace, for profiles that have equally many of them."""
        self.agreed(lambda profile: [bool(nbytes) for nbytes in found[profile]])  # one of no bytes is no block
        merged: list[BlockBytes | SharedBytes] = []
        for position, nbytes in enumerate(found[self._leader]):
            others = {profile: found[profile][position] for profile in self._followers}
            differing = {profile: other for profile, other in others.items() if other != nbytes}
            merged.append(SharedBytes(nbytes, differing) if differing else nbytes)
        return merged
