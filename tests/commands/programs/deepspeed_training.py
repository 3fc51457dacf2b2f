"""A user's loop with a DeepSpeed engine, which has its sizes and its optimizer from a JSON file."""

from __future__ import annotations

import argparse

import deepspeed
import torch
from small_network import Network, Samples


def main() -> None:
    """Train for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    options = parser.parse_args()

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would take a compiler, and minutes
    deepspeed.init_distributed()
    model = Network()
    engine, _, loader, _ = deepspeed.initialize(
        args=options, model=model, model_parameters=model.parameters(), training_data=Samples()
    )
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
