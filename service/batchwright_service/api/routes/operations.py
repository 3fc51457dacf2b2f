"""The routes of `/v1/devices`, `/v1/queue`, `/v1/fleet`, `/v1/summary` and `/v1/occupancy`."""

from typing import Annotated

from fastapi import Query

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.fleet import Fleet
from batchwright.client.documents.workers import DeviceList, Occupancy, OccupancyPeriod, Period, Queue, Summary
from batchwright_service.api.authentication import CurrentCaller
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import Limit, QueueSlot
from batchwright_service.api.strict_route import strict_router

SummaryPeriod = Annotated[Period, Query(description="Period that the summary covers.")]
CoveredTime = Annotated[OccupancyPeriod, Query(description="Time that the occupancy covers.")]

router = strict_router("operations", scope=Scope.TUNINGS_READ)


@router.get("/v1/devices", summary="List devices")
def list_devices(context: Context) -> DeviceList:
    """List the devices of the workers, with the work that each runs and the length of its queue."""
    return context.devices.list()


@router.get("/v1/queue", summary="Read the queue")
def read_queue(context: Context, limit: Limit = 50, slot: QueueSlot = None) -> Queue:
    """List the queued work in the order in which workers take it, with the expected waits where they are known.

    With `slot`, the first 2,000 waiting tunings and jobs are searched. A slot that no worker has served within a day
    has none.
    """
    return context.queue.read(limit, slot)


@router.get("/v1/fleet", summary="Read the state of the fleet")
def read_fleet(context: Context) -> Fleet:
    """List the clusters on which a dispatcher runs work, with their nodes and the reasons why work waits."""
    return context.devices.fleet()


@router.get("/v1/summary", summary="Read the statistics of a period")
def read_summary(context: Context, caller: CurrentCaller, period: SummaryPeriod = Period.DAY) -> Summary:
    """Summarize the work that ended within a period, and the work that has not ended.

    The summary has states, causes of failures, device-seconds and uses of stored recommendations. It is at most two
    seconds old. The causes of failed jobs require the scope `jobs:read`.
    """
    return context.summary.read(period, caller)


@router.get("/v1/occupancy", summary="Read the occupancy of the devices")
def read_occupancy(context: Context, period: CoveredTime = OccupancyPeriod.DAY) -> Occupancy:
    """Read for which share of each half hour of the last day work held each device, from the records of the work.

    With `period=7d`: of each two hours of the last seven days.

    Work that has ended counts for the device on which it ran last, also the time of earlier attempts, which is placed
    before that of the last one. Deleted work does not count. The response is at most ten seconds old.
    """
    return context.occupancy.read(period)
