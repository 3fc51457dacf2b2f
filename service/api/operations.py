"""/v1/devices and what a supervisor of the service asks."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from service.api.authentication import needs
from service.api.dependencies import Cases
from service.api.problems import declared
from service.fleet import DeviceList, Health
from service.keys import Scope

router = APIRouter(tags=["operations"])


@router.get(
    "/v1/devices",
    operation_id="listDevices",
    summary="List devices",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.UNAUTHORIZED),
)
def list_devices(cases: Cases) -> DeviceList:
    """The devices that are served, what holds each, and how much waits for it."""
    return cases.devices()


@router.get("/livez", operation_id="checkLiveness", summary="Whether the process answers")
async def livez() -> Health:
    """Answers as long as the process does. Looks at nothing else."""
    return Health(status="ok")


@router.get("/readyz", operation_id="checkReadiness", summary="Whether work can be done")
def readyz(cases: Cases) -> Health:
    """Writes to the database, and looks whether every worker was heard of lately; 503 when not."""
    return cases.readiness()
