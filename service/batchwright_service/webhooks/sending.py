"""One attempt to deliver a message: a POST in bounded time, whose redirects are not followed."""

import socket
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata
from typing import Any

import httpcore
from typing_extensions import override

from batchwright_service.errors import InvalidInputError
from batchwright_service.store.outbox.deliveries import LeasedDelivery
from batchwright_service.webhooks.receivers import AllowedReceivers
from batchwright_service.webhooks.signatures import signed_headers

_MOST_ANSWERED = 64 * 1024
"""Bytes of a response that are read; the rest is ignored."""
_QUOTED = 200
"""Characters of a response that an error quotes."""


@dataclass(frozen=True)
class Attempt:
    """The result of an attempt; the receiver has the message if there is no error."""

    status: int | None = None
    error: str | None = None


class Sender:
    """Sends messages. Safe to share between threads.

    Args:
        receivers: the receivers that the operator allows; they are checked at each attempt.
        timeout_seconds: the longest time of an attempt after the host's name is resolved.
    """

    def __init__(self, receivers: AllowedReceivers, timeout_seconds: float) -> None:
        self._receivers = receivers
        self._timeout_seconds = timeout_seconds
        self._tls = ssl.create_default_context()  # the certificates of the system, or those of SSL_CERT_FILE
        self._agent = f"batchwright/{metadata.version('batchwright')}"

    def send(self, leased: LeasedDelivery) -> Attempt:
        """Send a message once. No failure is raised."""
        try:
            return self._post(leased)
        except InvalidInputError as error:
            return Attempt(error=str(error))
        except AddressRefusedError as error:
            return Attempt(error=str(error))
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
            return Attempt(error=f"{type(error).__name__}: {error}")

    def _post(self, leased: LeasedDelivery) -> Attempt:
        url = self._receivers.checked_url(leased.url)
        body = leased.body.encode()
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": self._agent,
            **signed_headers(leased.secrets, leased.id, int(leased.now), body),
        }
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        backend = CheckedBackend(self._receivers.allows_address, time.monotonic() + self._timeout_seconds)
        with (
            httpcore.ConnectionPool(ssl_context=self._tls, network_backend=backend) as pool,
            pool.stream("POST", target, headers=list(headers.items()), content=body) as response,
        ):
            return _judged(response.status, _beginning(response))


def _beginning(response: httpcore.Response) -> bytes:
    """Return the beginning of a response. Delivery succeeded once the status arrived; the rest is ignored."""
    read = b""
    try:
        for chunk in response.iter_stream():
            read += chunk
            if len(read) >= _MOST_ANSWERED:
                break
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
        pass
    return read[:_MOST_ANSWERED]


def _judged(status: int, answer: bytes) -> Attempt:
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Attempt(status)
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return Attempt(status, f"the receiver answered {status}: redirects are not followed")
    quoted = "".join(part if part.isprintable() else " " for part in answer[: 4 * _QUOTED].decode("utf-8", "replace"))
    said = f": {quoted[:_QUOTED].strip()}" if quoted.strip() else ""
    return Attempt(status, f"the receiver answered {status}{said}")


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
