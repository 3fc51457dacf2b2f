"""``batchwright devices`` and ``batchwright gpus``: list the devices of this host, and the GPU catalogue."""

import sys

from batchwright.cli import options
from batchwright.cli.display import plain_console
from batchwright.hardware.gpu_table import GPUS
from batchwright.units import format_bytes


def devices(*, json: options.Json = False) -> None:
    """List the devices of this host."""
    from batchwright.hardware.inventory import devices as find_devices  # noqa: PLC0415 - see commands.tune

    for found in find_devices():
        used = "" if found.used_bytes is None else f", {format_bytes(found.used_bytes)} in use"
        text = f"{found.id}: {found.name}, {format_bytes(found.total_bytes)}{used}"
        sys.stdout.write((found.model_dump_json() if json else text) + "\n")


def gpus(*, json: options.Json = False) -> None:
    """List the GPUs that `estimate` knows, with the memory that torch reports."""
    from batchwright.cli.estimate_display import gpu_table  # noqa: PLC0415 - see commands.tune

    if json:
        sys.stdout.writelines(gpu.model_dump_json() + "\n" for gpu in GPUS)
    else:
        plain_console().print(gpu_table(GPUS))
