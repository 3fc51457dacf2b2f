"""Plain PyTorch: a script with Batchwright's engine, which takes uneven micro-batches and needs no service."""

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import checked_environment, origin, python_file, variables_to_unset
from batchwright.exports.spec_advice import counts_tokens, left_out, nodes, torch_call
from batchwright.schemas.optimizer import ScheduleSpec

_SCRIPT = "train.py"
_CPU = 'torch.device("cpu")'
_CARD = f'torch.device("cuda", local_rank()) if torch.cuda.is_available() else {_CPU}'
_AUTOCAST = {"bf16-mixed": "torch.bfloat16", "fp16-mixed": "torch.float16"}


def _write(context: ExportContext) -> TargetOutput:
    head = "\n".join((_head(context), _plan(context)))
    script = "\n\n\n".join((head, _MODEL, _DATA, _loss(context), _main(context), _START))
    return TargetOutput((python_file(_SCRIPT, script),), _command(context), _warnings(context))


def _command(context: ExportContext) -> tuple[str, ...]:
    machines, processes = nodes(context)
    if machines > 1:
        return ()
    if processes > 1:
        return ("torchrun", "--standalone", f"--nproc-per-node={processes}", _SCRIPT)
    return ("python", _SCRIPT)


# --- the script ---


def _head(context: ExportContext) -> str:
    spec = context.spec
    scheduled, ours = spec.schedule != ScheduleSpec(), not spec.optimizer.is_of_torch
    schemas = [*["OptimizerSpec"] * ours, *["ScheduleSpec"] * scheduled]
    built = [*["build_optimizer"] * ours, *["build_schedule"] * scheduled]
    names = ["BatchSchedule", "GradientAccumulation", "Position", "join_ranks", *["local_rank"] * (not context.on_cpu)]
    lines = [
        f"{origin(context)}#",
        "# Needs `pip install 'batchwright[torch]'`, and no service. Replace `build_model`, `build_data`, `collate`",
        "# and `loss`, which are small examples, so that the program runs at once.",
        "",
        "import argparse",
        "import os",
        "import sys",
        "",
        *_environment(context),
        "import torch",
        "from torch import nn",
        "from torch.nn import functional as F",
        "from torch.utils.data import TensorDataset, default_collate",
        "",
        f"from batchwright import {', '.join([*schemas, *names, *built])}",
        "",
    ]
    return "\n".join(lines)


def _environment(context: ExportContext) -> list[str]:
    """Lines that restart the script with the measured environment, which C libraries read at the start."""
    variables, unset = dict(checked_environment(context.recommendation.environment)), variables_to_unset(context)
    if not variables and not unset:
        return []
    entries = [f"    {name!r}: {value!r}," for name, value in variables.items()]
    return [
        "ENVIRONMENT = {  # the variables of the measurement; memory allocators read them when the process starts",
        *entries,
        "}",
        f"UNSET = {unset!r}  # settings of the allocator that the probes did not have",
        "environment = {name: value for name, value in os.environ.items() if name not in UNSET} | ENVIRONMENT",
        "if environment != dict(os.environ):",
        "    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)",
        "",
    ]


def _plan(context: ExportContext) -> str:
    plan = context.plan
    return (
        f"EFFECTIVE_BATCH_SIZE = {plan.effective_batch_size}\n"
        f"MICRO_BATCH_SIZE = {plan.micro_batch_size}  # the largest; a rank's share is divided evenly\n"
        f"WORLD_SIZE = {plan.world_size}\n"
        "SEED = 0"
    )


_MODEL = '''def build_model():
    """Your model, on the CPU."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))'''

_DATA = '''def build_data():
    """Your samples: anything with a length, and a sample at each index."""
    inputs = torch.randn(2 * EFFECTIVE_BATCH_SIZE + 1, 16, generator=torch.Generator().manual_seed(SEED))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def collate(samples):
    """A micro-batch of samples, each tensor with the samples along its first dimension."""
    return default_collate(samples)'''


def _loss(context: ExportContext) -> str:
    dtype, smoothing = _AUTOCAST.get(context.spec.precision), context.spec.label_smoothing
    smoothed = f", label_smoothing={smoothing!r}" if smoothing else ""
    reduction = f'reduction="sum"{smoothed}'
    count = (
        f"\n\n    Of tokens: `cross_entropy(..., ignore_index=-100, {reduction})` and `(labels != -100).sum()`."
        if counts_tokens(context.spec)
        else ""
    )
    indent, autocast = "    ", ""
    if dtype is not None:
        indent, autocast = "        ", f"    with torch.autocast(inputs.device.type, dtype={dtype}):\n"
    closing = "\n    " if count else ""
    return (
        "def loss(model, batch):\n"
        f'    """The sum over what counts, and how much that is: never the mean.{count}{closing}"""\n'
        "    inputs, labels = batch\n"
        f"{autocast}"
        f"{indent}return F.cross_entropy(model(inputs), labels, {reduction}), len(labels)"
    )


def _main(context: ExportContext) -> str:
    spec = context.spec
    scheduled, averaged = spec.schedule != ScheduleSpec(), spec.ema_decay is not None
    schedule = f"ScheduleSpec(name={spec.schedule.name!r}, warmup_updates={spec.schedule.warmup_updates})"
    lines = [
        "def main():",
        '    """Make updates of exactly the effective batch; the last one of an epoch takes what is left of it."""',
        "    parser = argparse.ArgumentParser()",
        '    parser.add_argument("--updates", type=int, default=10)',
        "    updates = parser.parse_args().updates",
        f"    device = {_CPU if context.on_cpu else _CARD}",
        "    ranks = join_ranks(device)",
        "    if ranks.size != WORLD_SIZE:",
        '        sys.exit(f"{ranks.size} ranks were started, but the plan is for {WORLD_SIZE}")',
        "    torch.manual_seed(SEED)",
        f"    model = build_model().to(device{', torch.bfloat16' if spec.precision == 'bf16' else ''})",
        *(["    model = torch.compile(model)"] if spec.compile else []),
        f"    optimizer = {torch_call(spec.optimizer)}",
        *([f"    schedule = build_schedule({schedule}, optimizer, updates)"] if scheduled else []),
        f"    accumulation = GradientAccumulation({', '.join(_engine(context))})",
        *(["    averages = [p.detach().to(torch.float32, copy=True) for p in accumulation.parameters]"] * averaged),
        "    data = build_data()",
        "    batches = BatchSchedule(SEED, len(data), EFFECTIVE_BATCH_SIZE, ranks.rank, ranks.size)",
        "    position = Position()",
        "    while position.update < updates:",
        "        largest = accumulation.largest_micro_batch or MICRO_BATCH_SIZE  # less after one that did not fit",
        "        window = batches.window(position, largest)",
        "        micro_batches = [collate([data[index] for index in samples.indices]) for samples in window]",
        "        report = accumulation.update(micro_batches, loss)",
        *(["        if not report.skipped:"] if scheduled or averaged else []),
        *(["            schedule.step()"] if scheduled else []),
        *(["            for average, parameter in zip(averages, accumulation.parameters):"] if averaged else []),
        *([f"                average.lerp_(parameter.detach().float(), 1 - {spec.ema_decay!r})"] if averaged else []),
        "        if ranks.rank == 0:",
        "            samples = batches.size(position)",
        '            print(f"update {position.update + 1}: batch of {samples}, loss {report.loss:.4f}")',
        "        position = batches.advanced(position)",
        "    ranks.close()",
    ]
    return "\n".join(lines)


def _engine(context: ExportContext) -> list[str]:
    """Arguments of ``GradientAccumulation``."""
    spec = context.spec
    arguments = ["model", "optimizer", "ranks=ranks"]
    if context.recommendation.request.allow_batch_coupling:
        arguments.append("checks_coupling=False")
    if spec.gradient_clipping is not None:
        arguments.append(f"max_norm={spec.gradient_clipping!r}")
    if spec.precision == "fp16-mixed":
        arguments.append("scaler=torch.amp.GradScaler(device.type)")
    if spec.precision == "bf16":
        arguments.append("floating=torch.bfloat16")
    if spec.gradient_gathering != "auto":
        arguments.append(f"gathering={spec.gradient_gathering!r}")
    return arguments


_START = """if __name__ == "__main__":
    main()
"""


def _warnings(context: ExportContext) -> Warnings:
    found: Warnings = {}
    machines, _ = nodes(context)
    if machines > 1:
        found["several-machines"] = (
            f"The run takes {machines} machines: start `{_SCRIPT}` by one of the launchers' exports, which "
            "know how they find each other."
        )
    found |= left_out(
        context,
        "activation-checkpointing-in-code",
        "adapter-in-code",
        "packing-in-code",
        "preference-in-code",
        "evaluation",
        "optimizer-of-the-workload",
        "sharding-left-out",
        "longest-sample",
    )
    return found


TARGET = Target(
    name="pytorch",
    title="Plain script for PyTorch",
    kind="framework",
    loop="batchwright",
    versions=("2.8",),
    repeats_one_size=False,
    takes=frozenset({"processes_per_node"}),
    write=_write,
    checked="run with torch, alone and under torchrun",
)
