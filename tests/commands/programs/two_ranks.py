"""A user's loop over several ranks, started by torchrun: DDP, or FSDP2."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from small_network import Network, Samples
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def sharded(model: Network) -> nn.Module:
    """The model under FSDP2, a unit for each layer."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Train for one epoch; gradients are reduced in the last micro-batch of a window."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()

    distributed.init_process_group("gloo")
    model = sharded(Network()) if options.strategy == "fsdp" else DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters())
    data = Samples()
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    for number, (inputs, labels) in enumerate(loader, 1):
        last = number % options.accumulate == 0
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        skipped = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if skipped and isinstance(model, DistributedDataParallel) else nullcontext():
            loss = torch.nn.functional.cross_entropy(model(inputs), labels) / options.accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
