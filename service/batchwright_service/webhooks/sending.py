"""One attempt to deliver a message: a POST in bounded time, whose redirects are not followed."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata

import httpcore

from batchwright_service.errors import InvalidInputError
from batchwright_service.store.outbox.deliveries import LeasedDelivery
from batchwright_service.webhooks.network import AddressRefusedError, CheckedBackend
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
