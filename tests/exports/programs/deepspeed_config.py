"""Reads a DeepSpeed file as one of eight ranks would, and tells what became of it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore] # of `make test-exports`
from deepspeed.runtime.config import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    DeepSpeedConfig,
)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would take a compiler, and minutes
deepspeed.init_distributed("gloo")
settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
read = DeepSpeedConfig(settings, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 8))
print(read.train_batch_size, read.gradient_clipping, read.zero_optimization_stage, read.torch_autocast_dtype)
