"""Part ``jobs`` of gpu_evidence.py: jobs of other optimizers, adapters, quantised bases, pairs and packed documents.

Each is tuned at one size, estimated from its spec alone, and then trained for three updates. What the job takes is to
be what the probe measured, and what the estimate said.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchwright.driving.foreground import run_tuning
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import parse_spec
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.workloads.pretrained.folder_config import with_pretrained_config

UPDATES = 3
LENGTH = 1024
Row = dict[str, Any]
GPT2 = {"kind": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}}
LLAMA = {
    "kind": "transformers",
    "task": "causal-lm",
    "config": {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
_LORA = {"kind": "lora", "rank": 16, "target_modules": "all-linear"}
_PAIRS = {"preference": {"kind": "dpo"}}


def _quantized(**changes: object) -> Row:
    return {"precision": "bf16", "adapter": {**_LORA, "quantization": {"kind": "nf4", **changes}}}


CASES: dict[str, tuple[Row, int, Row]] = {
    "gpt2, adamw8bit": (GPT2, 16, {"optimizer": {"name": "adamw8bit"}}),
    "llama, qlora": (LLAMA, 16, _quantized()),
    "llama, qlora, one sample": (LLAMA, 1, _quantized()),
    "llama with lora, pairs": (LLAMA, 8, {"adapter": _LORA, **_PAIRS}),
    "gpt2, packed": (GPT2, 16, {"batch": {"sequence_length": LENGTH, "packing": "bfd"}}),
    "gpt2, pairs": (GPT2, 8, _PAIRS),
    "llama, lion8bit": (LLAMA, 16, {"optimizer": {"name": "lion8bit"}}),
    "llama, qlora, scales too": (LLAMA, 16, _quantized(double_quantization=True)),
    "gpt2, muon": (GPT2, 16, {"optimizer": {"name": "muon", "momentum": 0.95}}),
    "gpt2, lion": (GPT2, 16, {"optimizer": {"name": "lion"}}),
    "llama, base in 8 bits": (LLAMA, 16, _quantized(kind="int8")),
}
"""Of each job its model, its micro-batch, and what else its spec says; the most wanted first."""


def rows(
    device: DeviceInfo, tuned: Callable[[Recommendation], Row], estimated: Callable[[Recommendation, DeviceInfo], Row]
) -> Iterator[tuple[str, Row]]:
    """Yield what was found of each job; the estimate of one is made beside its training."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, size, changes) in CASES.items():
            began, row = time.monotonic(), Row()
            try:
                if "quantization" in changes.get("adapter", {}):
                    model = _pretrained(model, Path(folder) / "base")  # noqa: PLW2901 - the same one, from a folder
                found = run_tuning(_request(device, model, size, changes))
                row |= tuned(found)
                with ThreadPoolExecutor(1) as pool:
                    estimate = pool.submit(estimated, found, device)
                    row |= {"job": _trained(found)}
                    row |= estimate.result()
            except Exception as error:  # noqa: BLE001 - the next job may succeed
                row["failed"] = f"{type(error).__name__}: {error}"[:2000]
            yield name, {**row, "seconds": round(time.monotonic() - began, 1)}


def _pretrained(model: Row, folder: Path) -> Row:
    """Save the model with random weights in ``folder``, unless it is there, and return its spec from there."""
    if not folder.exists():
        config = dict(model["config"])
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        built.to(torch.bfloat16).save_pretrained(folder)
    return {**{key: value for key, value in model.items() if key != "config"}, "pretrained": str(folder)}


def _request(device: DeviceInfo, model: Row, size: int, changes: Row) -> TuningRequest:
    common = {
        "model": model,
        "batch": {"sequence_length": LENGTH},
        "precision": "bf16-mixed",
        "data": {"kind": "synthetic", "samples": 4096},
    }
    return TuningRequest(
        spec=with_pretrained_config(parse_spec({**common, **changes})),
        effective_batch_size=2 * size,
        max_micro_batch_size=size,
        device=device.id,
    )


def _trained(found: Recommendation) -> Row:
    """Return how a run of the recommendation ended, with the most memory it had reserved."""
    with tempfile.TemporaryDirectory() as folder:
        process = TrainingProcess(Path(folder))
        process.start(found, TrainingRequest(updates=UPDATES))
        while (result := process.poll()) is None:
            time.sleep(0.05)
        made = ProgressLog(RunPaths(Path(folder)).progress).new_lines()
    row: Row = {"outcome": result.outcome, "message": result.message, "seconds": round(result.seconds, 1)}
    if made:
        row |= {
            "micro_batch_sizes": made[-1].micro_batch_sizes,
            "reserved_bytes": made[-1].peak_bytes,
            "losses": [it.loss for it in made],
            "update_seconds": [round(it.seconds, 3) for it in made],
        }
    return row
