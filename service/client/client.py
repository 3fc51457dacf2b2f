"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import httpx

from service.client.errors import ConnectionFailedError
from service.client.resources import Devices, Estimates, Gpus, Jobs, Recommendations, Tunings
from service.client.wire import Call, DocumentT, parsed
from service.domain import Health

DEFAULT_URL = "http://127.0.0.1:8000"


class Client:
    """Talks to one service. Safe to share between threads; close it, or use it as a context.

    Args:
        base_url: where the service listens.
        timeout_seconds: how long one answer may take, the time asked to wait for aside.
        http: an `httpx.Client` to use instead, for example with a proxy; its owner closes it.
    """

    def __init__(
        self, base_url: str = DEFAULT_URL, *, timeout_seconds: float = 30.0, http: httpx.Client | None = None
    ) -> None:
        self._owns_http = http is None
        self._http = httpx.Client(base_url=base_url, timeout=timeout_seconds) if http is None else http
        self._timeout_seconds = timeout_seconds
        self.tunings = Tunings(self)
        self.recommendations = Recommendations(self)
        self.jobs = Jobs(self)
        self.devices = Devices(self)
        self.estimates = Estimates(self)
        self.gpus = Gpus(self)

    def livez(self) -> Health:
        """Whether the service answers.

        Raises:
            ConnectionFailedError: when it does not.
        """
        return self.call(Health, Call("GET", "/livez"))

    def readyz(self) -> Health:
        """Whether the service can do its work.

        Raises:
            ApiError: when it cannot; the problem says why.
        """
        return self.call(Health, Call("GET", "/readyz"))

    def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call that answers with a ``kind``; ``extra_seconds`` is what it was asked to wait.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
        """
        return parsed(kind, self.send(call, extra_seconds))

    def send(self, call: Call, extra_seconds: float = 0.0) -> httpx.Response:
        """Make a call.

        Raises:
            ConnectionFailedError: when the service cannot be reached.
        """
        with translated():
            return self._http.request(**call.arguments(), timeout=self._timeout_seconds + extra_seconds)

    @contextmanager
    def stream(self, call: Call, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """An answer that is read as it comes. It may be silent for as long as the service's keep-alives allow.

        Raises:
            ConnectionFailedError: when the service cannot be reached, or the connection breaks.
        """
        with translated(), self._http.stream(**call.arguments(), headers=headers, timeout=60.0) as response:
            yield response

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        """Ready to call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


@contextmanager
def translated() -> Iterator[None]:
    """The one seam where httpx's errors become ours."""
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionFailedError(f"the service cannot be reached: {type(error).__name__}: {error}") from error
