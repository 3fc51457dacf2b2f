"""``batchwright estimate``: estimate what fits on GPUs that need not be present."""

from typing import Annotated

import typer

from batchwright.cli import options
from batchwright.cli.arguments import estimate_request, with_options
from batchwright.cli.display import progress_console
from batchwright.cli.ending_signals import SignalsAsInterrupt
from batchwright.cli.errors import ExitCode
from batchwright.cli.output import print_result
from batchwright.errors import EstimateTimedOutError
from batchwright.schemas.estimates import Engine, Estimate, EstimateRequest


def estimate(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    *,
    gpu: options.Gpus = None,
    all_gpus: options.AllGpus = False,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Estimate this size; the largest that fits is reported in any case.")
    ] = None,
    effective_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per optimizer update over all ranks: also plan this batch.")
    ] = None,
    world_size: options.WorldSize = None,
    memory_margin: options.MemoryMargin = 0.03,
    allocator: options.Allocator = "default",
    loop: options.Loop = "batchwright",
    engine: options.Engine = "trace",
    timeout: options.EstimateTimeout = 120.0,
    json: options.Json = False,
) -> None:
    """Estimate what fits on GPUs that need not be present, with the uncertainty and the plan.

    An estimate is not a proof: `tune` measures. Exit code 3 when the workload fits on none of the GPUs.

    Examples: batchwright estimate spec.yaml --gpu H100-80GB --gpu A10G --effective-batch-size 512

    batchwright estimate spec.yaml --gpu T4 --engine virtual
    """
    from batchwright.cli.estimate_display import estimate_display, fits_nowhere  # noqa: PLC0415 - see commands.tune

    request = estimate_request(
        spec=spec,
        world_size=world_size,
        gpus=gpu or (),
        all_gpus=all_gpus,
        micro_batch_size=micro_batch_size,
        effective_batch_size=effective_batch_size,
        memory_margin=memory_margin,
        allocator=allocator,
        loop=loop,
        timeout_seconds=timeout,
    )
    found = _estimated(request, engine)
    print_result(found, as_document=json, text=estimate_display(found, request))
    raise typer.Exit(ExitCode.INFEASIBLE if fits_nowhere(found, request) else ExitCode.OK)


def _estimated(request: EstimateRequest, engine: Engine) -> Estimate:
    """Estimate with the engine, and show what it does."""
    from batchwright.driving.virtual_estimate import estimate_on_virtual_cards  # noqa: PLC0415 - see commands.tune
    from batchwright.estimation import client  # noqa: PLC0415 - see commands.tune

    with SignalsAsInterrupt(), progress_console().status("tracing updates, without a GPU") as status:
        if engine == "virtual":
            return estimate_on_virtual_cards(request, status.update)
        try:
            return client.estimate(request)
        except EstimateTimedOutError as error:
            raise EstimateTimedOutError(with_options(str(error))) from None
