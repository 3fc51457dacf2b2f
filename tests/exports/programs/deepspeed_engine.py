"""A user's loop with a DeepSpeed engine, which has its figures and its optimizer from the file."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore] # of `make test-exports`
import torch
from counting import Counting, samples
from torch.utils.data import DataLoader


def main() -> None:
    """Train over all samples once."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would take a compiler, and minutes
    deepspeed.init_distributed("gloo")
    model = Counting()
    if sys.argv[2:] == ["bf16"]:
        model.to(torch.bfloat16)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    optimizer.register_step_post_hook(model.updated)
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=engine.train_micro_batch_size_per_gpu(), drop_last=True)  # type: ignore[arg-type] # a list will do
    for inputs, labels in loader:
        logits = engine(inputs.to(next(model.parameters()).dtype))
        engine.backward(torch.nn.functional.cross_entropy(logits, labels))
        engine.step()
    model.write()
    state = {name: str(value.dtype) for values in optimizer.state.values() for name, value in values.items()}
    report = {
        "clipping": engine.gradient_clipping(),
        "batch": engine.train_batch_size(),
        "optimizer": f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}",
        "parameters": str(next(model.parameters()).dtype),
        "state": state,
    }
    Path("report.json").write_text(json.dumps(report), encoding="utf-8")


main()
