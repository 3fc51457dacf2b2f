"""accelerate: `find_executable_batch_size` around a training function that accumulates by `accelerator.accumulate`.

As its example `automatic_gradient_accumulation.py` does it: the search starts at the effective batch.
"""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from common_task import EFFECTIVE_BATCH_SIZE, build_model, limit_memory, loader, loss
from torch.optim import AdamW


def main() -> None:
    """Find, plan, train over all samples once."""
    accelerator = Accelerator(cpu=True)
    limit_memory()

    @find_executable_batch_size(starting_batch_size=EFFECTIVE_BATCH_SIZE)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = EFFECTIVE_BATCH_SIZE // batch_size
        model = build_model()
        optimizer = AdamW(model.parameters())
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch_size))
        for batch in batches:
            with accelerator.accumulate(model):
                loss_sum, tokens = loss(model, batch)
                accelerator.backward(loss_sum / tokens)
                optimizer.step()
                optimizer.zero_grad()
        return batch_size

    print("largest:", train(), "steps:", accelerator.gradient_accumulation_steps)


if __name__ == "__main__":
    main()
