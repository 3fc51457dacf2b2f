"""Compare a fine-tuning job of ours with HF Trainer and TRL: losses, weights, held-out loss, peak and time.

python benchmarks/fine_tuning.py [--updates N] [--only full lora] [--folder F] [--output results/fine_tuning.json]

A small GPT-2 over bytes is trained on the sources of Python's standard library, and then on its reference manual
(``pydoc_data.topics``, a sample for each paragraph, of 3 to 128 bytes), whole and by a LoRA adapter. All ways start
from the same weights, take the same samples in the same order, and have the same optimizer, rates, clipping, effective
batch and size of micro-batches. Each runs in a process of its own, on as many threads, with the allocator's settings of
our jobs; ``fine_tuning_runs.py`` has the others.

What is compared: the loss of each update and the trained weights with those of a plain loop over undivided batches; the
held-out loss of what was written, by one function for all; the peak of the process's memory above that after the
imports, as probes and jobs count it; the seconds of all updates, without imports.
"""

import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import safetensors.torch
import torch
from fine_tuning_runs import WAYS, Batch, Task, build_model, padded, trained, unwrapped
from reporting import HERE, measured_here, new_parser, write_result
from torch import Tensor, nn

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.library.tuning import tune
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress, TrainingResult
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.data.seeding import epoch_order
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.rng_state import seed_everything
from batchwright.workloads.adapters.adapter_output import trained_state
from batchwright.workloads.build import build_workload
from batchwright.workloads.pretrained.folder_config import with_pretrained_config
from batchwright.workloads.pretrained.starting_weights import StartingWeights

LENGTH, EFFECTIVE_BATCH, MICRO_BATCH = 128, 32, 8
MODEL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 128,
    "n_positions": LENGTH,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
PRETRAINING_UPDATES = 120
HELD_OUT_EVERY = 10
"""One paragraph of so many is held out."""
MEMORY_LIMIT = "1GiB"
RATES = {"full": 1e-3, "lora": 3e-3}
UPDATES = {"full": 40, "lora": 12}
LORA = {"rank": 8, "alpha": 16, "target_modules": ["c_attn", "c_fc"]}
PEFT = {"r": 8, "lora_alpha": 16, "target_modules": ["c_attn", "c_fc"]}
CLIPPING = 1.0
OURS = "batchwright"
REFERENCE = "whole_batch"
LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets")
Row = dict[str, Any]

# --- what is trained ---


def paragraphs() -> list[str]:
    """Paragraphs of Python's reference manual."""
    return [text for topic in topics.values() for part in topic.split("\n\n") if (text := part.strip())]


def write_rows(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write the samples that train and those that are held out as JSON lines, and the former's tokens as ours go.

    Return the two files of JSON lines.
    """
    texts = paragraphs()
    held_out = texts[::HELD_OUT_EVERY]
    training = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY and text not in set(held_out)]
    paths = folder / "training.jsonl", folder / "held_out.jsonl"
    for path, part in zip(paths, (training, held_out), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8")
    tokens = [list(text.encode()[:LENGTH]) for text in training]
    ordered = [tokens[index] for index in epoch_order(seed, 0, len(tokens)).tolist()]
    (folder / "rows.json").write_text(json.dumps(ordered))
    return paths


def train(directory: Path, found: Recommendation, updates: int) -> tuple[TrainingResult, list[TrainingProgress]]:
    """Run a job of ours to its end.

    Raises:
        RuntimeError: when it does not succeed.
    """
    process = TrainingProcess(directory)
    process.start(found, TrainingRequest(updates=updates, checkpoint_every=updates, noise_scale_every=0))
    while (result := process.poll()) is None:
        time.sleep(0.05)
    if result.outcome is not RunOutcome.SUCCEEDED:
        raise RuntimeError(result.message)
    lines = RunPaths(directory).progress.read_text(encoding="utf-8").splitlines()
    return result, [TrainingProgress.model_validate_json(line) for line in lines]


def recommend(spec: WorkloadSpec) -> Recommendation:
    """Have probes prove the plan, with the size of micro-batches that all ways have."""
    return tune(
        spec,
        EFFECTIVE_BATCH,
        device="cpu",
        memory_limit=MEMORY_LIMIT,
        max_micro_batch_size=MICRO_BATCH,
        progress=False,
    )


def pretrain(folder: Path) -> tuple[Path, float]:
    """Train the model on the standard library's sources. Return its folder and its last loss."""
    spec = parse_spec(
        {
            "model": {"kind": "transformers", "task": "causal-lm", "config": MODEL},
            "batch": {"sequence_length": LENGTH},
            "optimizer": {"learning_rate": 3e-3},
            "schedule": {"name": "cosine", "warmup_updates": 5},
            "gradient_clipping": CLIPPING,
            "data": {"kind": "text", "paths": [f"{sysconfig.get_paths()['stdlib']}/*.py"]},
        }
    )
    result, _ = train(folder / "base", recommend(spec), PRETRAINING_UPDATES)
    return RunPaths(folder / "base").pretrained, float(result.loss or math.nan)


def fine_tuning(kind: str, base: Path, rows: Path, held_out: Path) -> WorkloadSpec:
    """The spec of our job."""
    document = {
        "model": {"kind": "transformers", "task": "causal-lm", "pretrained": str(base)},
        "batch": {"sequence_length": LENGTH},
        "optimizer": {"learning_rate": RATES[kind], "weight_decay": 0.0},
        "schedule": {"name": "linear"},
        "gradient_clipping": CLIPPING,
        "data": {"kind": "records", "paths": [str(rows)]},
        "evaluation": {"data": {"kind": "records", "paths": [str(held_out)]}},
        **({"adapter": {"kind": "lora", **LORA}} if kind == "lora" else {}),
    }
    return with_pretrained_config(parse_spec(document))


def write_adapter(spec: WorkloadSpec, base: Path, path: Path, seed: int) -> None:
    """Write the matrices that our job of an adapter starts from, by the names of peft's wrapper."""
    seed_everything(seed)
    model = build_workload(spec, StartingWeights(base, lambda _: None)).build_model()
    safetensors.torch.save_file({name: value.contiguous() for name, value in trained_state(model).items()}, str(path))


# --- what came of it ---


def held_out_loss(model: nn.Module, texts: Path) -> float:
    """Mean cross-entropy of the held-out tokens, a sample at a time."""
    total, count = 0.0, 0
    for line in texts.read_text(encoding="utf-8").splitlines():
        tokens = list(json.loads(line)["text"].encode()[:LENGTH])
        if len(tokens) > 1:
            batch: Batch = padded([tokens])
            with torch.no_grad():
                total += float(model.eval()(**batch).loss) * (len(tokens) - 1)
            count += len(tokens) - 1
    return total / count


def with_weights(task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a task with what a way has trained."""
    model = build_model(task)
    state = unwrapped(model).state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            state[name].copy_(value)
    return model


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two sets of weights."""
    return math.sqrt(sum(float((one[name].double() - value.double()).square().sum()) for name, value in other.items()))


def compared(kind: str, task: Task, found: dict[str, Row], weights: dict[str, dict[str, Tensor]], texts: Path) -> Row:
    """The figures of all ways of one kind of fine-tuning."""
    initial = trained(build_model(task))
    way_trained = distance(initial, weights[REFERENCE])
    ways = {}
    for name, row in found.items():
        differences = [abs(loss - true) for loss, true in zip(row["losses"], found[REFERENCE]["losses"], strict=True)]
        ways[name] = {
            **row,
            "largest_loss_difference": max(differences),
            "mean_loss_difference": sum(differences) / len(differences),
            "weights_off": distance(weights[name], weights[REFERENCE]) / way_trained,
            "held_out_loss": held_out_loss(with_weights(task, weights[name]), texts),
        }
        shown = {key: value for key, value in ways[name].items() if key != "losses"}
        print(f"{kind}, {name}: {json.dumps(shown)}", flush=True)
    return {"held_out_loss_before": held_out_loss(build_model(task), texts), "ways": ways}


def ours(spec: WorkloadSpec, directory: Path, updates: int) -> tuple[Row, dict[str, Tensor]]:
    """Tune, train, and read what our job wrote."""
    found = recommend(spec)
    result, progress = train(directory, found, updates)
    evaluation = result.evaluation.last if result.evaluation else None
    row = {
        "losses": [made.loss for made in progress],
        "seconds": sum(made.seconds for made in progress),
        "peak_bytes": progress[-1].peak_bytes,
        "probed_peak_bytes": found.headroom.peak_bytes if found.headroom else None,
        "plan": found.plan.model_dump(mode="json") if found.plan else None,
        "own_held_out_loss": evaluation.loss if evaluation else None,
    }
    return row, safetensors.torch.load_file(RunPaths(directory).weights)


def theirs(way: str, task: Task, directory: Path) -> tuple[Row, dict[str, Tensor]]:
    """Run a way of the others in a process of its own."""
    directory.mkdir(parents=True)
    (directory / "task.json").write_text(json.dumps(task))
    command = [sys.executable, str(HERE / "fine_tuning_runs.py"), way, str(directory)]
    environment = {**os.environ, **CPU_ENVIRONMENT, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - this interpreter
    if done.returncode:
        sys.exit(f"{way}: {done.stderr[-4000:]}")
    found: Row = json.loads((directory / "found.json").read_text(encoding="utf-8"))
    return found, safetensors.torch.load_file(directory / "trained.safetensors")


def measured(kind: str, base: Path, folder: Path, updates: int) -> Row:
    """Fine-tune in all ways."""
    texts = folder / "held_out.jsonl"
    spec = fine_tuning(kind, base, folder / "training.jsonl", texts)
    initial = folder / "initial.safetensors" if kind == "lora" else None
    if initial is not None:
        write_adapter(spec, base, initial, TrainingRequest().seed)
    task = Task(
        base=str(base),
        adapter=PEFT if kind == "lora" else None,
        initial=None if initial is None else str(initial),
        rows=str(folder / "rows.json"),
        updates=updates,
        effective_batch_size=EFFECTIVE_BATCH,
        micro_batch_size=MICRO_BATCH,
        learning_rate=RATES[kind],
        clipping=CLIPPING,
        device="cpu",
    )
    pairs = {way: theirs(way, task, folder / f"{kind}-{way}") for way in WAYS}
    pairs[OURS] = ours(spec, folder / f"{kind}-{OURS}", updates)
    found = {name: row for name, (row, _) in pairs.items()}
    return compared(kind, task, found, {name: weights for name, (_, weights) in pairs.items()}, texts)


def main() -> None:
    """Train the base, fine-tune, print, write."""
    parser = new_parser(__doc__, "fine_tuning.json")
    parser.add_argument("--updates", type=int, help="of each fine-tuning; else as many as in UPDATES")
    parser.add_argument("--only", nargs="+", choices=list(RATES), default=list(RATES), help="only these")
    parser.add_argument("--folder", type=Path, help="keep all files there, instead of in a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        training, held_out = write_rows(folder, TrainingRequest().seed)
        base, loss = pretrain(folder)
        print(f"base: loss {loss:.4f}", flush=True)
        updates = {kind: options.updates or UPDATES[kind] for kind in options.only}
        kinds = {kind: measured(kind, base, folder, updates[kind]) for kind in options.only}
        digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in (training, held_out)}
    task = {
        "model": MODEL,
        "adapter": LORA,
        "pretraining_updates": PRETRAINING_UPDATES,
        "pretraining_loss": loss,
        "updates": updates,
        "effective_batch_size": EFFECTIVE_BATCH,
        "micro_batch_size": MICRO_BATCH,
        "learning_rates": RATES,
        "sha256": digests,
    }
    write_result(options.output, measured_here(*LIBRARIES) | {"task": task, "fine_tuning": kinds})


if __name__ == "__main__":
    main()
