"""A file of registered commands, whose only command trains a model of chosen width."""

import sys
from pathlib import Path
from typing import Any

import yaml

from batchwright.schemas.results import DeviceInfo
from tests.support.exports.plans import command_plan
from tests.support.factories import CPU

PROGRAM = """
import os, sys, time

options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
if options["note"] == "hold":
    open("held", "w").close()
    time.sleep(600)
import torch
print(repr(options["note"]))
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), float(options["rate"]))
loader = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=int(options["size"]))

class Wide(torch.nn.Module):
    def forward(self, batch):
        return model(batch).sum() + torch.ones(len(batch), int(options["width"]) * 2**18).sum()

wide = Wide()
for number, batch in enumerate(loader, 1):
    wide(batch).backward()
    if number % int(options["steps"]) == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
DEFINITION: dict[str, Any] = {
    "title": "Wide model",
    "description": "A linear model that takes `width` MiB per sample.",
    "argv": [
        sys.executable,
        "program.py",
        "--size={micro_batch_size}",
        "--steps={gradient_accumulation_steps}",
        "--width={argument:width}",
        "--rate={argument:rate}",
        "--note={argument:note}",
        "{argument:packing}",
    ],
    "arguments": {
        "width": {"type": "integer", "minimum": 1, "maximum": 64, "required": True, "description": "MiB per sample."},
        "rate": {"type": "number", "minimum": 1e-6, "maximum": 1.0, "default": 0.1},
        "note": {"type": "enum", "values": ["none", "hold"], "default": "none"},
        "packing": {"type": "boolean", "when_true": "--packing"},
    },
}


def commands_file(folder: Path, program: str = PROGRAM, **changes: Any) -> Path:
    """The program and the file of its command `wide` in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(program)
    path = folder / "commands.yaml"
    path.write_text(yaml.safe_dump({"commands": {"wide": DEFINITION | changes}}, sort_keys=False))
    return path


def named(**arguments: Any) -> dict[str, Any]:
    """The spec of a caller."""
    return {"model": {"kind": "command", "name": "wide", "arguments": arguments}}


def recommended(device: DeviceInfo = CPU, world_size: int = 1, **arguments: Any) -> dict[str, Any]:
    """A recommendation for the command, as a caller sends one: two micro-batches of 8 samples on each rank."""
    found = command_plan(world_size=world_size, device=device, name="wide", arguments=arguments)
    return found.model_dump(mode="json")


def submission(**arguments: Any) -> dict[str, Any]:
    """The body of a tuning of the command."""
    return {"spec": named(**arguments), "effective_batch_size": 60, "memory_limit_bytes": "400MiB"}
