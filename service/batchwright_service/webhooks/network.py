"""Connections to checked addresses, within a deadline."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpcore
from typing_extensions import override


class AddressRefusedError(Exception):
    """A host has an address to which no message may go."""


class CheckedBackend(httpcore.NetworkBackend):
    """Connect by TCP to an address that was checked: the host is looked up once, and all of its addresses must pass.

    Every operation ends at the deadline, however slowly the peer sends.

    Args:
        allows: whether a message may go to an IP address.
        deadline: the end of all operations, of ``time.monotonic``.
    """

    def __init__(self, allows: Callable[[str], bool], deadline: float) -> None:
        self._allows = allows
        self._deadline = deadline

    @override
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failure = f"{host} has no address"
        for address in self._checked(host, port):
            try:
                connected = socket.create_connection((address, port), _seconds_left(self._deadline))
            except OSError as error:
                failure = f"{address} port {port}: {error.strerror or error}"
                continue
            return _Stream(connected, self._deadline)
        raise httpcore.ConnectError(failure)

    def _checked(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host.

        Raises:
            ConnectError: when the host is unknown.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        refused = [address for address in addresses if not self._allows(address)]
        if refused:
            raise AddressRefusedError(
                f"{host} has the address {refused[0]}, which is not public; BATCHWRIGHT_WEBHOOK_NETWORKS can allow it"
            )
        return addresses


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the receiver took too long")
    return left


class _Stream(httpcore.NetworkStream):
    """A connected socket whose operations end at the deadline."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    @override
    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._socket.settimeout(_seconds_left(self._deadline))
        try:
            return self._socket.recv(max_bytes)
        except TimeoutError:
            raise httpcore.ReadTimeout("the receiver took too long") from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from None

    @override
    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._socket.settimeout(_seconds_left(self._deadline))
        try:
            self._socket.sendall(buffer)
        except TimeoutError:
            raise httpcore.WriteTimeout("the receiver took too long") from None
        except OSError as error:
            raise httpcore.WriteError(str(error)) from None

    @override
    def close(self) -> None:
        self._socket.close()

    @override
    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self._socket.settimeout(_seconds_left(self._deadline))
        try:
            secured = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except OSError as error:
            self.close()
            raise httpcore.ConnectError(f"TLS: {error}") from None
        return _Stream(secured, self._deadline)

    @override
    def get_extra_info(self, info: str) -> Any:
        return self._socket if info == "socket" else None
