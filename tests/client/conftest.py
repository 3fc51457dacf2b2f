"""The clients, their time, and the fixtures of the service's tests, since the tests of the SDK call a service."""

import pytest

from tests.service.conftest import _log_level, service, shared_service, start_service, starts
from tests.support.service.scripted_network import Clock, Driver

__all__ = ["_log_level", "clock", "drive", "service", "shared_service", "start_service", "starts"]


@pytest.fixture(params=["blocking", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Driver:
    """Both clients, one after the other."""
    return Driver(request.param)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the clients."""
    clock = Clock()
    clock.install(monkeypatch)
    return clock
