"""Train for three updates by another framework's loop, and print the peaks: LOOP SPEC SIZE MICRO_BATCHES.

``torchrun`` starts it for several ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.optimizers import build_optimizer
from batchwright.workloads.build import build_model, build_workload

UPDATES = 3
_LIGHTNING = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "bf16": "bf16-true"}


def hugging_face(model: nn.Module, data: list[dict[str, Tensor]], spec: WorkloadSpec, sizes: tuple[int, int]) -> None:
    """By transformers' ``Trainer``."""
    from transformers import Trainer, TrainingArguments

    size, micro_batches = sizes
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=size,
        gradient_accumulation_steps=micro_batches,
        max_steps=UPDATES,
        bf16=spec.precision == "bf16-mixed",
        max_grad_norm=spec.gradient_clipping or 0.0,
        optim="adamw_torch",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=data).train()


def lightning(model: nn.Module, data: list[dict[str, Tensor]], spec: WorkloadSpec, sizes: tuple[int, int]) -> None:
    """By Lightning's automatic optimization."""
    from lightning import LightningModule, Trainer

    size, micro_batches = sizes

    class Module(LightningModule):  # type: ignore[misc]
        """The model, with its own loss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _number: int) -> Tensor:
            """The loss."""
            outputs = self.model(**batch)
            loss: Tensor = outputs.loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """That of the spec."""
            return build_optimizer(spec.optimizer, self.model)

    trainer = Trainer(
        max_steps=UPDATES,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=spec.gradient_clipping,
        precision=_LIGHTNING[spec.precision],
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), _loader(data, size))


def plain(model: nn.Module, data: list[dict[str, Tensor]], spec: WorkloadSpec, sizes: tuple[int, int]) -> None:
    """By the loop of tutorials."""
    size, micro_batches = sizes
    if spec.parallelism.world_size > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        data = data[dist.get_rank() :: dist.get_world_size()]
        model = nn.parallel.DistributedDataParallel(model.cuda())
    model.cuda()
    optimizer = build_optimizer(spec.optimizer, model)
    for number, batch in enumerate(_loader(data, size)):
        inputs = {name: values.cuda() for name, values in batch.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=spec.precision == "bf16-mixed"):
            outputs = model(**inputs)
            loss = outputs.loss / micro_batches
        loss.backward()
        if (number + 1) % micro_batches == 0:
            if spec.gradient_clipping is not None:
                nn.utils.clip_grad_norm_(model.parameters(), spec.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()


def _loader(data: list[dict[str, Tensor]], size: int) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=size)  # type: ignore[arg-type]


def main(loop: str, path: str, size: str, micro_batches: str) -> None:
    """Make the samples of the spec's workload, train and print."""
    spec = WorkloadSpec.model_validate_json(Path(path).read_bytes())
    workload = build_workload(spec)
    sizes = int(size), int(micro_batches)
    samples = sizes[0] * sizes[1] * UPDATES * spec.parallelism.world_size
    single = (workload.make_batch(1) for _ in range(samples))  # each with the padding of the worst case
    data = [{name: values[0] for name, values in batch.items()} for batch in single]
    run = {"hugging-face": hugging_face, "lightning": lightning, "plain": plain}[loop]
    run(build_model(spec, workload), data, spec, sizes)
    peaks = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(f"\n{json.dumps(peaks)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
