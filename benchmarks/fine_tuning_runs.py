"""One fine-tuning of fine_tuning.py in a process of its own, by a trainer of others or by a plain loop.

python benchmarks/fine_tuning_runs.py WAY FOLDER

``FOLDER/task.json`` is the task (``Task``). All ways start from the weights of the same folder and, with an adapter,
from the same matrices, take the samples in the same order, and write ``found.json`` and ``trained.safetensors``.
Started with the allocator's settings that our jobs have; memory is counted as there, from after the imports on.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401 - before memory is counted

from batchwright.hardware.memory_devices.factory import open_device
from batchwright.system.files import write_atomically

IGNORED = -100
Batch = dict[str, Tensor]


class Task(TypedDict):
    """A fine-tuning, equal for all ways."""

    base: str
    """Folder of the model that training starts from."""
    adapter: dict[str, Any] | None
    """Arguments of ``LoraConfig``; None where all weights are trained."""
    initial: str | None
    """File of the adapter's initial matrices."""
    rows: str
    """File of the samples that train: lists of token ids in the order of training."""
    updates: int
    effective_batch_size: int
    micro_batch_size: int
    learning_rate: float
    clipping: float
    device: str


def padded(rows: Sequence[Any]) -> Batch:
    """Make a batch of token lists, padded on the right; padding has no label."""
    samples = [row["input_ids"] if isinstance(row, dict) else row for row in rows]
    length = max(map(len, samples))
    return {
        "input_ids": torch.tensor([[*row, *[0] * (length - len(row))] for row in samples]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in samples]),
        "labels": torch.tensor([[*row, *[IGNORED] * (length - len(row))] for row in samples]),
    }


def build_model(task: Task) -> nn.Module:
    """Build the model with the initial weights of the task."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(task["base"])
    if task["adapter"] is None:
        return model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # as for any GPT-2
        adapted: nn.Module = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **task["adapter"]))
    initial = safetensors.torch.load_file(str(task["initial"]))
    state = adapted.state_dict()
    with torch.no_grad():
        for name, value in initial.items():
            state[f"base_model.model.{name}"].copy_(value)
    return adapted


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without a wrapper of peft: its names are those of our jobs."""
    inner: nn.Module = model.base_model.model if isinstance(model, PeftModel) else model
    return inner


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters by name, on the CPU."""
    named = unwrapped(model).named_parameters()
    return {name: value.detach().cpu().contiguous() for name, value in named if value.requires_grad}


# --- ways ---


def whole_batch(task: Task, rows: list[list[int]], _: Path) -> tuple[nn.Module, Callable[[], list[float]]]:
    """A plain loop whose batches are not divided: what the others approximate."""
    model = build_model(task).to(task["device"])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task["learning_rate"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 - update / task["updates"])
    model.train()

    def run() -> list[float]:
        losses, size = [], task["effective_batch_size"]
        for update in range(task["updates"]):
            batch = padded(rows[update * size : (update + 1) * size])
            loss = model(**{name: value.to(task["device"]) for name, value in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, task["clipping"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    return model, run


def hugging_face(task: Task, rows: list[list[int]], folder: Path) -> tuple[nn.Module, Callable[[], list[float]]]:
    """HF Trainer as it is."""
    return _with_trainer(Trainer, task, rows, folder)


def own_loss(task: Task, rows: list[list[int]], folder: Path) -> tuple[nn.Module, Callable[[], list[float]]]:
    """HF Trainer with a loss of the user's, the mean over a micro-batch, in the documented way."""
    return _with_trainer(MeanLossTrainer, task, rows, folder)


class MeanLossTrainer(Trainer):  # type: ignore[misc] # untyped
    """A trainer with a loss of its own, a mean over the tokens of a micro-batch.

    As transformers documents for such losses, the trainer divides them by the number of accumulation steps.
    """

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # noqa: FBT001, FBT002, ANN401 - the interface of transformers
        """Return the mean cross-entropy of the next tokens."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
        return (loss, outputs) if return_outputs else loss


def trl(task: Task, rows: list[list[int]], folder: Path) -> tuple[nn.Module, Callable[[], list[float]]]:
    """SFTTrainer of TRL, with the samples as token ids."""
    from datasets import Dataset  # noqa: PLC0415 - as in _import_packages
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415 - as above

    longest = max(map(len, rows))
    arguments = SFTConfig(**_arguments(task, folder), max_length=longest, gradient_checkpointing=False)
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    trainer = SFTTrainer(model=build_model(task), args=arguments, train_dataset=data, processing_class=byte_tokenizer())
    return trainer.model, lambda: _train(trainer)


def byte_tokenizer() -> Any:  # noqa: ANN401 - transformers ships no usable types
    """A tokenizer whose ids 0 to 255 are bytes, as those of the samples; byte 0 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - as in _import_packages
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=alphabet[0], eos_token=alphabet[0])


def _with_trainer(
    trainer_class: type[Trainer], task: Task, rows: list[list[int]], folder: Path
) -> tuple[nn.Module, Callable[[], list[float]]]:
    samples = [{"input_ids": row} for row in rows]
    arguments = TrainingArguments(**_arguments(task, folder), remove_unused_columns=False)
    trainer = trainer_class(model=build_model(task), args=arguments, train_dataset=samples, data_collator=padded)
    return trainer.model, lambda: _train(trainer)


def _arguments(task: Task, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": task["updates"],
        "per_device_train_batch_size": task["micro_batch_size"],
        "gradient_accumulation_steps": task["effective_batch_size"] // task["micro_batch_size"],
        "learning_rate": task["learning_rate"],
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": task["clipping"],
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": task["device"] == "cpu",
        "dataloader_pin_memory": False,
    }


def _train(trainer: Trainer) -> list[float]:
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


WAYS = {"whole_batch": whole_batch, "hugging_face": hugging_face, "own_loss": own_loss, "trl": trl}


def _warm_up(way: str, task: Task, rows: list[list[int]], folder: Path) -> None:
    """Make two updates of two samples, so that what is imported late is imported before memory is counted."""
    small: Task = {**task, "updates": 2, "effective_batch_size": 2, "micro_batch_size": 1}
    short = [row[:16] for row in rows[:4]]
    WAYS[way](small, short, folder)[1]()


def main(way: str, folder: Path) -> None:
    """Fine-tune and write what came of it."""
    task: Task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    rows: list[list[int]] = json.loads(Path(task["rows"]).read_text(encoding="utf-8"))
    _warm_up(way, task, rows, folder)
    memory = open_device(task["device"])
    memory.release()
    memory.reset_peaks()
    model, run = WAYS[way](task, rows, folder)
    began = time.perf_counter()
    losses = run()
    memory.synchronize()
    seconds = time.perf_counter() - began
    found = {"losses": losses, "seconds": seconds, "peak_bytes": memory.peak_bytes()}
    safetensors.torch.save_file(trained(model), str(folder / "trained.safetensors"))
    write_atomically(folder / "found.json", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
