"""The contenders of ``accumulation_exactness.py``: each trains ``task.model`` with ``task.optimizer``."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter

import torch
import torch.distributed as dist
from accumulation_task import MICRO_BATCH, CausalModelWithKeywords, Task, collate
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchwright.training.accumulation.collectives import join_ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.micro_batches.splitting import windows
from batchwright.workloads.base import count_labels


def naive(task: Task, *, steps_at_the_end: bool = True) -> None:
    """The tutorials' loop: the mean of each micro-batch over the number of accumulation steps."""
    for _ in range(task.epochs):
        loader = task.loader()
        for index, batch in enumerate(loader):
            (task.model(**batch)["loss"] / task.steps).backward()
            if (index + 1) % task.steps == 0 or (steps_at_the_end and index + 1 == len(loader)):
                task.optimizer.step()
                task.optimizer.zero_grad()


def naive_without_end(task: Task) -> None:
    """``naive`` without a step for what is left at the end of an epoch."""
    naive(task, steps_at_the_end=False)


def accelerate(task: Task) -> None:
    """https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation."""
    from accelerate import Accelerator  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.steps)
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer, task.loader())
    for _ in range(task.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()


def lightning(task: Task) -> None:
    """Trainer(accumulate_grad_batches=...), with automatic optimization."""
    import lightning as pl  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415 - see `bench`

    class Module(pl.LightningModule):  # type: ignore[misc,unused-ignore] # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    pl.Trainer(
        accelerator="cpu",
        devices=task.world,
        strategy="ddp" if task.world > 1 else "auto",
        max_epochs=task.epochs,
        accumulate_grad_batches=task.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), task.loader())


def trainer_with_keywords(task: Task) -> None:
    """HF Trainer and a model that takes ``**kwargs``, and so learns the number of tokens in the window."""
    task.use(CausalModelWithKeywords())
    trainer_without_keywords(task)


def trainer_without_keywords(task: Task) -> None:
    """HF Trainer and a model that takes no ``**kwargs``."""
    from transformers import PrinterCallback, Trainer, TrainingArguments  # noqa: PLC0415 - slow to import

    updates = len(task.expected())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=task.epochs,
            max_steps=-1 if task.sized else updates,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=task.steps,
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            ddp_backend="gloo" if task.world > 1 else None,
        )
        trainer = Trainer(task.model, arguments, collate, task.dataset(), optimizers=(task.optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def ours(task: Task) -> None:
    """Ours: a loss as a sum and its weight, the loader in windows."""
    ranks = join_ranks(torch.device("cpu"))
    accumulation = GradientAccumulation(task.model, task.optimizer, ranks=ranks)
    for _ in range(task.epochs):
        for window in windows(task.loader(ranks.rank if ranks.size > 1 else None), task.steps):
            accumulation.update(window, lambda model, batch: itemgetter("loss_sum", "weight")(model(**batch)))


def _by_hand_over_ranks(task: Task, divisor: Callable[[float, float, float], float]) -> None:
    """DistributedDataParallel with ``no_sync``, and each sum divided by what ``divisor`` makes of the tokens."""
    join_ranks(torch.device("cpu"))
    model = DistributedDataParallel(task.model)
    batches = list(task.loader(dist.get_rank()))
    tokens = [float(count_labels(batch["labels"][:, 1:])) for batch in batches]
    total = torch.tensor(sum(tokens))
    dist.all_reduce(total)
    for index, (batch, weight) in enumerate(zip(batches, tokens, strict=True)):
        with nullcontext() if index + 1 == len(batches) else model.no_sync():
            (model(**batch)["loss_sum"] / divisor(weight, float(total), task.steps)).backward()
    task.optimizer.step()


def naive_over_ranks(task: Task) -> None:
    """The tutorials' loop on ranks: a mean of means of means."""
    _by_hand_over_ranks(task, lambda weight, _total, steps: weight * steps)


def without_world_size(task: Task) -> None:
    """Tokens of all ranks are known, but not that DistributedDataParallel divides by the number of ranks."""
    _by_hand_over_ranks(task, lambda _weight, total, _steps: total)


def with_world_size(task: Task) -> None:
    """Right by hand."""
    _by_hand_over_ranks(task, lambda _weight, total, _steps: total / task.world)


def trainer_without_length(task: Task) -> None:
    """HF Trainer, a model that takes ``**kwargs``, and a dataset without ``__len__``."""
    task.sized = False
    trainer_with_keywords(task)


ALONE: dict[str, Callable[[Task], None]] = {
    "naive loop, steps at an epoch's end": naive,
    "naive loop, does not": naive_without_end,
    "accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer, model takes **kwargs": trainer_with_keywords,
    "HF Trainer, model without": trainer_without_keywords,
    "HF Trainer, dataset without a length": trainer_without_length,
    "ours": ours,
}
OVER_RANKS: dict[str, Callable[[Task], None]] = {
    "naive loop in DDP": naive_over_ranks,
    "DDP, tokens without the world size": without_world_size,
    "DDP, tokens with the world size": with_world_size,
    "accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer, model takes **kwargs": trainer_with_keywords,
    "HF Trainer, model without": trainer_without_keywords,
    "ours": ours,
}
