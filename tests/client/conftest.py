"""The fixtures of the service's tests, since the tests of the SDK call a service."""

from tests.service.conftest import _log_level, service, shared_service, start_service, starts

__all__ = ["_log_level", "service", "shared_service", "start_service", "starts"]
