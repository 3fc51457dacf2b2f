"""Sharded models (FSDP2), and their state as full tensors.

A checkpoint holds full tensors under the names and numbers of an unsharded model, so that a run may resume with another
number of ranks, or without sharding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from batchwright.errors import FieldProblem, SpecError, WorkloadError
from batchwright.torch_internals import fsdp_parameter_groups, tree_map
from batchwright.workloads.causal.reference_policy import reference_of


def shard(model: nn.Module, device: torch.device, world_size: int) -> None:
    """Shard every parameter over the ranks: each member of a ``ModuleList`` (a block) by itself, then the rest.

    Gradients are summed over the ranks, not averaged: losses are already divided by the global weight. Gradients of
    parameters narrower than fp32 are summed in fp32, and rounded once.

    Raises:
        SpecError: when the model has parameters that cannot be sharded.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    narrow = any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    try:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        if (reference := reference_of(model)) is not None:  # so that its embeddings are gathered for its pass alone
            fully_shard(reference, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    except ValueError as error:  # a parameter without dimensions, say
        raise SpecError([FieldProblem("parallelism.strategy", f"fsdp cannot shard this model: {error}")]) from None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction that FSDP uses


class _OwnBuffers:
    """Allocate buffers as torch's own collectives of FSDP do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _RepeatingGather(_OwnBuffers):
    """Gather parameters of which every shard is taken to be this rank's: a loss scaler needs finite values."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Fill the output; the input is its own part of it."""
        for shard_ in output_tensor.view(group.size(), -1)[1:]:
            shard_.copy_(input_tensor.view(-1))


class _KeepingScatter(_OwnBuffers):
    """Reduce gradients to this rank's shard of its own, without those of other ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: object, **__: object
    ) -> None:
        """Copy the first shard of the input."""
        output_tensor.view(-1).copy_(input_tensor.view(group.size(), -1)[0])


def simulate_other_ranks(model: nn.Module) -> None:
    """Make a sharded model run without its other ranks, in a process group that does not communicate.

    Raises:
        SpecError: when torch has no way to replace the collectives of FSDP, as 2.8 has not.
    """
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        needed = f"fsdp with fewer devices than ranks needs a newer torch than {torch.__version__}"
        raise SpecError([FieldProblem("parallelism.strategy", needed)])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_RepeatingGather())  # type: ignore[arg-type] # its class is not public
            module.set_custom_reduce_scatter(_KeepingScatter())  # type: ignore[arg-type]


def require_summed_gradients(model: nn.Module) -> None:
    """Check that no part of ``model`` divides its gradients when it reduces them over ranks.

    Raises:
        WorkloadError: naming the module, the divisor and the call that sets it.
    """
    for name, module in model.named_modules():
        divisor = _gradient_divisor(module) if isinstance(module, FSDPModule) else 1.0
        if divisor != 1.0:
            raise WorkloadError(
                f"FSDP divides the gradients of {f'`{name}`' if name else 'the model'} by {divisor:g} when it reduces "
                "them, but the losses of a window are already divided by its weight over all ranks: call "
                "set_gradient_divide_factor(1.0) on every module that fully_shard was called with (on gloo also "
                "set_force_sum_reduction_for_comms(True))"
            )


def _gradient_divisor(module: FSDPModule) -> float:
    """The divisor that torch uses: by default, the number of ranks in the module's mesh."""
    for group in fsdp_parameter_groups(module):
        factor = getattr(group, "gradient_divide_factor", None)
        divisor = float(group.mesh_info.mesh.size() if factor is None else factor)
        if divisor != 1.0:
            return divisor
    return 1.0


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules: the parts that are gathered one at a time."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += _blocks(child)
    return found


def full_tensors(value: Any, *, keep: bool = True) -> Any:  # noqa: ANN401 - nested state of any kind
    """Replace every shard in nested dicts and lists by its full tensor. Every rank must call this.

    Where this rank does not ``keep`` the result, shards are replaced by empty tensors; else they are gathered one at a
    time into the host's memory.
    """

    def full(leaf: object) -> object:
        if isinstance(leaf, DTensor):
            gathered = leaf.full_tensor()
            return gathered.cpu() if keep else gathered.new_empty(0)
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map(full, value)


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load full ``weights`` into the model, each rank its shard. Names of tied weights may be missing."""
    own = model.state_dict()
    model.load_state_dict({name: sharded_like(tensor, own[name]) for name, tensor in weights.items()}, strict=False)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the full ``state_dict`` of an optimizer into ``optimizer``, each rank its shard."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {
        number: {name: sharded_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({"state": sharded, "param_groups": state["param_groups"]})


def sharded_like(value: Any, own: Tensor) -> Any:  # noqa: ANN401 - an entry of a state may be no tensor
    """``value`` sharded like ``own``, if ``own`` is a shard and both have the same shape."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
