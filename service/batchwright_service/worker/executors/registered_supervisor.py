"""A supervisor of the commands that the operator has registered."""

from collections.abc import Callable

from typing_extensions import override

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, ProbeResult


class RegisteredSupervisor(CommandSupervisor):
    """Runs the probes of registered commands alone.

    Each check and each probe may raise a SpecError: when the command is not registered on this host, or not so. A link
    may have changed since the last one.

    Args:
        device: the device.
        check_command: checks that a command is registered on this host; raises ``SpecError`` if not.
    """

    def __init__(self, device: DeviceInfo, check_command: Callable[[CommandSpec], None]) -> None:
        super().__init__(device)
        self._check_command = check_command

    @override
    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._require_registered(request)
        super().check(request, should_stop)

    @override
    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        self._require_registered(request)
        return super().run(request, should_stop)

    def _require_registered(self, request: TuningRequest | ProbeRequest) -> None:
        if isinstance(request.spec, CommandSpec):
            self._check_command(request.spec)
