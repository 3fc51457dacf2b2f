"""Share of the positions that hold tokens, with the records of an update grouped by length and as they are drawn.

    python benchmarks/grouping.py

The records are the docstrings of the standard library of this Python, as bytes, cut at 512: an epoch of updates of 256
records in micro-batches of 8. The figures depend on the version of Python alone.
"""

import ast
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from batchwright.schemas.workload import parse_spec
from batchwright.training.batch_schedule import BatchSchedule, Position
from batchwright.training.data.base import TrainingData
from batchwright.training.data.build import build_data
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.build import build_workload

LENGTH, EFFECTIVE_BATCH_SIZE, MICRO_BATCH_SIZE = 512, 256, 8
CONFIG: dict[str, Any] = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": LENGTH}
CONFIG |= {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}


def docstrings() -> list[str]:
    """Read the docstrings of the modules at the top of the standard library."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(Path(ast.__file__).parent.glob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def share_of_tokens(data: TrainingData, lengths: Tensor | None) -> float:
    """Return the share of the positions of an epoch's batches that hold tokens."""
    schedule, position = BatchSchedule(0, len(data), EFFECTIVE_BATCH_SIZE, lengths=lengths), Position()
    tokens = positions = 0
    while not position.epoch:
        for samples in schedule.window(position, MICRO_BATCH_SIZE):
            labels = data.batch(samples.indices)["labels"]
            tokens += int((labels != IGNORED_LABEL).sum())
            positions += labels.numel()
        position = schedule.advanced(position)
    return round(tokens / positions, 4)


def main() -> None:
    """Print both shares as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "docstrings.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()), encoding="utf-8")
        spec = parse_spec(
            {
                "model": {"kind": "transformers", "task": "causal-lm", "config": CONFIG},
                "batch": {"sequence_length": LENGTH},
                "data": {"kind": "records", "paths": [str(path)]},
            }
        )
        data = build_data(spec, build_workload(spec))
        figures = {
            "python": platform.python_version(),
            "records": len(data),
            "as drawn": share_of_tokens(data, None),
            "grouped": share_of_tokens(data, data.lengths),
        }
    json.dump(figures, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
