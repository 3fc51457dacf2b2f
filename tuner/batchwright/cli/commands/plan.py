"""``batchwright plan``: plan an effective batch around a known micro-batch size, without a device."""

from typing import Annotated

import typer

from batchwright.cli import options
from batchwright.cli.display import describe_balanced_plan, describe_uniform_plan
from batchwright.cli.output import print_result
from batchwright.planning.accumulation import balanced_plan, uniform_plan


def plan(
    effective_batch_size: options.EffectiveBatchSize,
    max_micro_batch_size: Annotated[int, typer.Option(min=1, help="The largest micro-batch that fits.")],
    *,
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    uniform: Annotated[bool, typer.Option("--uniform", help="Repeat one micro-batch size.")] = False,
    json: options.Json = False,
) -> None:
    """Plan an effective batch around a known micro-batch size, without a device.

    Example: batchwright plan --effective-batch-size 100 --max-micro-batch-size 37
    """
    if uniform:
        repeated = uniform_plan(effective_batch_size, world_size, max_micro_batch_size)
        print_result(repeated, as_document=json, text=describe_uniform_plan(repeated))
    else:
        balanced = balanced_plan(effective_batch_size, world_size, max_micro_batch_size)
        print_result(balanced, as_document=json, text=describe_balanced_plan(balanced))
