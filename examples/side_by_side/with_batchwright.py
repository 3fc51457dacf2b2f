"""Batchwright: find the largest micro-batch, plan the effective batch around it, accumulate exactly."""

from common_task import (
    EFFECTIVE_BATCH_SIZE,
    MEMORY_LIMIT_BYTES,
    build_model,
    limit_memory,
    loader,
    longest_batch,
    loss,
)
from torch.optim import AdamW

from batchwright import GradientAccumulation, find_batch_size


def main() -> None:
    """Find, plan, train over all samples once."""
    found = find_batch_size(
        build_model,
        longest_batch,
        loss,
        effective_batch_size=EFFECTIVE_BATCH_SIZE,
        device="cpu",
        memory_limit=MEMORY_LIMIT_BYTES,
        memory_margin=0.0,
        progress=False,
    )
    print("largest:", found.largest_micro_batch_size)
    print("tried:", *(f"{probe.micro_batch_size} {probe.outcome}" for probe in found.evidence.probes))
    memory = limit_memory()
    model = build_model()
    accumulation = GradientAccumulation(model, AdamW(model.parameters()), plan=found, memory=memory)
    for batch in loader(EFFECTIVE_BATCH_SIZE):
        report = accumulation.update([batch], loss)
        print("update:", report.micro_batch_sizes)


if __name__ == "__main__":
    main()
