"""/v1/devices, /v1/queue and what a supervisor of the service asks."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query

from service.api.authentication import Calling, needs
from service.api.context import Context
from service.api.dependencies import Limit
from service.api.problems import COMMON_STATUSES, declared
from service.api.strict_route import StrictRoute
from service.domain.api_keys import Scope
from service.domain.workers import DeviceList, Health, Period, Queue, Summary

SummaryPeriod = Annotated[Period, Query(description="How far back to look.")]

router = APIRouter(tags=["operations"], responses=declared(*COMMON_STATUSES), route_class=StrictRoute)


@router.get(
    "/v1/devices",
    operation_id="listDevices",
    summary="List devices",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.UNAUTHORIZED),
)
def list_devices(context: Context) -> DeviceList:
    """The devices that are served, what holds each, and how much waits for it."""
    return context.fleet.devices()


@router.get(
    "/v1/queue",
    operation_id="readQueue",
    summary="Read the queue",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.UNAUTHORIZED, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def read_queue(context: Context, limit: Limit = 50) -> Queue:
    """What waits, in the order in which it is taken, and how long that may last where it can be told."""
    return context.fleet.queue(limit)


@router.get(
    "/v1/summary",
    operation_id="readSummary",
    summary="Read what happened lately",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.UNAUTHORIZED, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def read_summary(context: Context, caller: Calling, period: SummaryPeriod = Period.DAY) -> Summary:
    """What ended within a period, and what has not ended: states, causes of failures, device-seconds, stored answers.

    It is as things were at most two seconds ago. Why jobs failed is told to callers with `jobs:read` alone.
    """
    return context.summary.read(period, caller)


@router.get("/livez", operation_id="checkLiveness", summary="Whether the process answers")
async def livez() -> Health:
    """Answers as long as the process does. Looks at nothing else."""
    return Health(status="ok")
