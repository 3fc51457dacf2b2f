"""Finders of others, put by hand into the programs of commands.py.

python benchmarks/commands_peers.py PEER PROGRAM LIMIT DIARY

Started by commands.py, from the folder of the programs, with the allocator's settings that our probes have. A user of
accelerate wraps the function that trains in its decorator, which also runs HF Trainer and TRL (`auto_find_batch_size`
is the same decorator). A user of Lightning has the program's model and loss in a module, and calls
`Tuner.scale_batch_size`. A trial is two updates of two micro-batches, three of Lightning's, as its default is.
"""

import itertools
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch  # from whose end on the budget counts, as in our probes
from finders_trials import Diary, Outcome
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchwright.hardware.failures import FailureKind, classify_exception
from batchwright.hardware.memory_devices.cpu import status_bytes

STARTED_BYTES = status_bytes("VmData")
"""Private memory after torch's import."""

UPDATES, MICRO_BATCHES = 2, 2
Batch = Any
Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], DataLoader[Any]], Callable[[nn.Module, Batch], Tensor]]
"""The parts of a program: its model, its optimizer, its data in micro-batches, its loss."""


def classifier() -> Parts:
    """Those of the programs that share `small_network.py`."""
    from small_network import Network, Samples  # noqa: PLC0415 - one program per process

    model = Network()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return model, torch.optim.AdamW(model.parameters()), partial(_loaded, Samples()), loss


def descent() -> Parts:
    """Those of the program that reads YAML."""
    model, _, data, loss = classifier()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data, loss


def gpt() -> Parts:
    """Those of the program with HF Trainer."""
    from hugging_face_training import Texts, build_model  # noqa: PLC0415 - as above

    model = build_model()
    return model, torch.optim.AdamW(model.parameters()), partial(_loaded, Texts()), _loss_of_the_model


def adapter() -> Parts:
    """Those of the program with TRL."""
    from trl import SFTConfig  # noqa: PLC0415 - as above
    from trl_fine_tuning import build_trainer  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(SFTConfig(**_hugging_face(folder, 1), max_length=256, packing=True))
    data = partial(_loaded, trainer.train_dataset, collate_fn=trainer.data_collator)
    model = trainer.model
    return model, torch.optim.AdamW(model.parameters()), data, _loss_of_the_model


def _loaded(data: Any, size: int, **options: Any) -> DataLoader[Any]:  # noqa: ANN401 - data sets of three libraries
    return DataLoader(data, batch_size=size, drop_last=True, **options)


def _loss_of_the_model(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


PARTS: dict[str, Callable[[], Parts]] = {
    "plain_loop": classifier,
    "yaml_settings": descent,
    "accelerate_training": classifier,
    "lightning_training": classifier,
    "hugging_face_training": gpt,
    "trl_fine_tuning": adapter,
}

# --- trials: the function that a user of the decorator wraps ---


def by_hand(program: str, size: int) -> None:
    """The program's own loop."""
    model, optimizer, data, loss = PARTS[program]()
    batches = iter(data(size))
    for _ in range(UPDATES):
        for _ in range(MICRO_BATCHES):
            torch.autograd.backward(loss(model, next(batches)) / MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()


def with_accelerate(program: str, size: int) -> None:
    """The loop of accelerate's example of the decorator."""
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer, data, loss = PARTS[program]()
    model, optimizer, loader = accelerator.prepare(model, optimizer, data(size))
    for batch in itertools.islice(loader, UPDATES * MICRO_BATCHES):
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def with_lightning(program: str, size: int) -> None:
    """A Trainer of Lightning for each trial."""
    del program
    from lightning_training import Data, Module  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        _lightning_trainer(folder, max_steps=UPDATES).fit(Module(), Data(size))


def with_hugging_face(program: str, size: int) -> None:
    """A Trainer of HF for each trial."""
    del program
    from hugging_face_training import Texts, build_model  # noqa: PLC0415 - as above
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**_hugging_face(folder, size))
        Trainer(build_model(), arguments, train_dataset=Texts()).train()


def with_trl(program: str, size: int) -> None:
    """A trainer of TRL for each trial."""
    del program
    from trl import SFTConfig  # noqa: PLC0415 - as above
    from trl_fine_tuning import build_trainer  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        build_trainer(SFTConfig(**_hugging_face(folder, size), max_length=256, packing=True)).train()


def _hugging_face(folder: str, size: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": UPDATES,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }


TRIALS: dict[str, Callable[[str, int], None]] = {
    "plain_loop": by_hand,
    "yaml_settings": by_hand,
    "accelerate_training": with_accelerate,
    "lightning_training": with_lightning,
    "hugging_face_training": with_hugging_face,
    "trl_fine_tuning": with_trl,
}

# --- the peers ---


def accelerate(program: str, diary: Diary, start: int) -> int:
    """``find_executable_batch_size``."""
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - as above

    def train(batch_size: int) -> int:
        began = time.monotonic()
        outcome: Outcome = "error"
        try:
            TRIALS[program](program, batch_size)
            outcome = "fit"
        except Exception as error:
            outcome = "oom" if classify_exception(error) is FailureKind.OUT_OF_MEMORY else "error"
            raise
        finally:
            diary.tried(batch_size, outcome, time.monotonic() - began)
        return batch_size

    answer: int = find_executable_batch_size(train, starting_batch_size=start)()
    return answer


def lightning(program: str, diary: Diary, mode: str) -> int:
    """``Tuner.scale_batch_size``; of its trials its hooks tell: one that has not ended when the next begins failed."""
    from lightning import LightningModule  # noqa: PLC0415 - as above
    from lightning.pytorch.tuner import Tuner  # noqa: PLC0415 - as above

    model, optimizer, data, loss = PARTS[program]()
    begun: list[tuple[int, float]] = []

    def end(outcome: Outcome) -> None:
        for size, at in begun:
            diary.tried(size, outcome, time.monotonic() - at)
        begun.clear()

    class Module(LightningModule):  # type: ignore[misc,unused-ignore] # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.network = model

        def training_step(self, batch: Batch, _number: int) -> Tensor:
            return loss(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def train_dataloader(self) -> DataLoader[Any]:
            return data(self.batch_size)

        def on_train_start(self) -> None:
            end("oom")
            begun.append((self.batch_size, time.monotonic()))

        def on_train_end(self) -> None:
            end("fit")

    with tempfile.TemporaryDirectory() as folder:
        answer = Tuner(_lightning_trainer(folder)).scale_batch_size(Module(), mode=mode)
    end("oom")
    assert answer is not None
    return int(answer)


def _lightning_trainer(folder: str, **options: Any) -> Any:  # noqa: ANN401 - untyped where it is not installed
    from lightning import Trainer  # noqa: PLC0415 - as above

    return Trainer(
        accelerator="cpu",
        accumulate_grad_batches=MICRO_BATCHES,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing="max_steps" not in options,  # the tuner saves and restores the state
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


PEERS: dict[str, Callable[[str, Diary], int]] = {
    "accelerate (128)": partial(accelerate, start=128),
    "Lightning power": partial(lightning, mode="power"),
    "Lightning binsearch": partial(lightning, mode="binsearch"),
}


def main(peer: str, program: str, limit: int, diary: Diary) -> None:
    """Set the limit, search, and write down the answer or how it failed."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path.cwd()))
    resource.setrlimit(resource.RLIMIT_DATA, (STARTED_BYTES + limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        diary.answered(PEERS[peer](program, diary))
    except Exception as error:  # noqa: BLE001 - whatever ends a peer is what is reported of it
        diary.failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Diary(Path(sys.argv[4])))
