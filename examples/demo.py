"""Run the whole workflow through the SDK: a service, a tuning and a training job.

A byte-level GPT-2 (random weights) learns the Python standard library's own sources, at an effective batch that the
device cannot hold at once. Uses CUDA if available, else the CPU with a memory budget. Writes ``runs/demo/``.

Run by ``make demo``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Console

from batchwright.cli.display import ProbeBoard, TrainingBar, recommendation_panel
from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.client.documents.work import EventKind, Job
from batchwright.library.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import TrainingProgress
from batchwright.schemas.workload import parse_spec
from batchwright.system.files import write_atomically
from batchwright.units import format_bytes

MIB, GIB = 1024**2, 1024**3
SOURCES = sysconfig.get_paths()["stdlib"]


def demo_request(device: DeviceInfo) -> TuningRequest:
    """Request a small GPT-2 on the CPU under 200 MiB, or one of the original size on a GPU under at most 16 GiB."""
    small = {"n_layer": 3, "n_head": 4, "n_embd": 128, "n_positions": 64}
    large = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 512}
    on_gpu = device.kind == "cuda"
    sizes = large if on_gpu else small
    fixed = {"model_type": "gpt2", "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    spec = parse_spec(
        {
            "model": {"kind": "transformers", "task": "causal-lm", "config": {**fixed, **sizes, **dropout}},
            "batch": {"sequence_length": sizes["n_positions"]},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3 if on_gpu else 3e-3, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_updates": 5},
            "precision": "bf16-mixed" if on_gpu else "fp32",
            "gradient_clipping": 1.0,
            "data": {"kind": "text", "paths": [f"{SOURCES}/*.py"]},
        }
    )
    return TuningRequest(
        spec=spec,
        effective_batch_size=1000 if on_gpu else 200,
        device=device.id,
        memory_limit_bytes=min(16 * GIB, device.total_bytes) if on_gpu else 200 * MIB,
    )


@contextmanager
def running_service(directory: Path) -> Iterator[str]:
    """Run a service on loopback, with its embedded store under ``directory``; yield its address."""
    environment = {**os.environ, "BATCHWRIGHT_DATA_DIR": str(directory), "BATCHWRIGHT_DATA_ROOTS": SOURCES}
    command = [sys.executable, "-m", "batchwright", "serve", "--port", "0"]
    directory.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)  # noqa: S603 - this program itself
    try:
        yield _address(process, directory / "service.log")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    """Return the address that the service prints; its later output goes to ``log``."""
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if " listens on " in line:
            threading.Thread(target=_copy, args=(process, log), daemon=True).start()
            return line.split()[-1]
    sys.exit("the service did not start:\n" + "".join(lines))


def _copy(process: subprocess.Popen[str], log: Path) -> None:
    with log.open("a") as stream:
        for line in process.stderr or ():
            stream.write(line)


def tune(client: Client, request: TuningRequest, console: Console) -> Recommendation:
    """Submit the tuning and show each probe as it ends."""
    tuning = client.tunings.submit(request, fresh=True)
    with ProbeBoard(console) as board:
        board.set_activity("probing in separate processes")
        for event in client.tunings.events(tuning.id):
            if event.kind is EventKind.PROBE and event.probe is not None:
                board.add(event.probe.result)
    ended = client.tunings.wait(tuning.id)
    if ended.recommendation is None:
        sys.exit(f"the tuning ended as {ended.state}: {ended.problem.detail if ended.problem else ''}")
    return ended.recommendation


def train(client: Client, found: Recommendation, updates: int, console: Console) -> tuple[Job, list[TrainingProgress]]:
    """Run the job and show the loss falling."""
    job = client.jobs.submit(found.id, TrainingRequest(updates=updates, checkpoint_every=20))
    updates_made = []
    with TrainingBar(console, updates) as bar:
        for event in client.jobs.events(job.id):
            if isinstance(event.progress, TrainingProgress):
                updates_made.append(event.progress)
                bar.show(event.progress)
    return client.jobs.wait(job.id), updates_made


def main() -> None:
    """Tune, train, and write the evidence to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    directory, console = options.output_dir.absolute(), Console(highlight=False)
    with running_service(directory / "service") as url, Client(url) as client:
        device = client.devices.list()[0].device
        request = demo_request(device)
        limit = format_bytes(request.memory_limit_bytes or device.total_bytes)
        console.print(f"[bold]Service[/] {url}, device {device.id} ({device.name}), limit {limit}")
        console.print(f"[bold]Tuning[/] GPT-2 over bytes, effective batch {request.effective_batch_size}")
        found = tune(client, request, console)
        write_atomically(directory / "recommendation.json", found.model_dump_json(indent=2))
        found.plot().write_html(directory / "memory.html")
        console.print(recommendation_panel(found))
        job, history = train(client, found, options.updates, console)
    losses = go.Scatter(x=[made.update for made in history], y=[made.loss for made in history], mode="lines")
    titles = {"xaxis_title": "optimizer update", "yaxis_title": "loss"}
    go.Figure(losses, layout=go.Layout(template="simple_white", **titles)).write_html(directory / "loss.html")
    if job.state is not State.SUCCEEDED:
        sys.exit(f"the job ended as {job.state}: {job.problem.detail if job.problem else ''}")
    console.print(
        f"[bold]Loss[/] {history[0].loss:.3f} -> {history[-1].loss:.3f} nats per byte in {len(history)} updates"
    )
    console.print(
        f"[bold]Written[/] to {options.output_dir}: {', '.join(sorted(path.name for path in directory.glob('*.*')))}"
    )


if __name__ == "__main__":
    main()
