"""accelerate, by its guide's section on samples of variable size: each sum is divided by the tokens of the update."""

from itertools import islice

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from common_task import EFFECTIVE_BATCH_SIZE, IGNORED, build_model, limit_memory, loader, loss
from torch.optim import AdamW


def main() -> None:
    """Find, plan, train over all samples once."""
    accelerator = Accelerator(cpu=True)
    limit_memory()

    @find_executable_batch_size(starting_batch_size=EFFECTIVE_BATCH_SIZE)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        steps = EFFECTIVE_BATCH_SIZE // batch_size
        accelerator.gradient_accumulation_steps = steps
        model = build_model()
        optimizer = AdamW(model.parameters())
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch_size))
        iterator = iter(batches)
        while window := list(islice(iterator, steps)):
            tokens = sum((batch[:, 1:] != IGNORED).sum() for batch in window)
            tokens = accelerator.gather(tokens).sum().item()
            for batch in window:
                loss_sum, _ = loss(model, batch)
                # `backward` divides by the steps, and DDP by the processes
                accelerator.backward(loss_sum * steps * accelerator.num_processes / tokens)
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    print("largest:", train(), "steps:", accelerator.gradient_accumulation_steps)


if __name__ == "__main__":
    main()
