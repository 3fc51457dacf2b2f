"""The synchronous client."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

import httpx

from service.client.errors import ClientError, ConnectionFailedError
from service.client.resources import Devices, Estimates, Gpus, Jobs, Recommendations, Tunings
from service.client.wire import Call, DocumentT, parsed
from service.fleet import Health

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "BATCHWRIGHT_API_KEY"

_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")


class Client:
    """Talks to one service. Safe to share between threads; close it, or use it as a context.

    Args:
        base_url: where the service listens.
        api_key: what the service knows the caller by; that of the environment variable BATCHWRIGHT_API_KEY when left
            out, and none when there is none.
        timeout_seconds: how long one answer may take, the time asked to wait for aside.
        http: an `httpx.Client` to use instead, for example with a proxy; its owner closes it.

    Raises:
        ClientError: when the key cannot be one.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        http: httpx.Client | None = None,
    ) -> None:
        self._headers = _authorization(os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key)
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
            return self._http.request(**self._arguments(call), timeout=self._timeout_seconds + extra_seconds)

    @contextmanager
    def stream(self, call: Call, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """An answer that is read as it comes. It may be silent for as long as the service's keep-alives allow.

        Raises:
            ConnectionFailedError: when the service cannot be reached, or the connection breaks.
        """
        with translated(), self._http.stream(**self._arguments(call, headers), timeout=60.0) as response:
            yield response

    def _arguments(self, call: Call, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        given = call.arguments()
        return {**given, "headers": {**given.get("headers", {}), **self._headers, **headers}}

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


def _authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries a key. An error never shows the key.

    Raises:
        ClientError: when it holds what no header can carry: then it is not a key.
    """
    key = (api_key or "").strip()
    if not key:
        return {}
    if not _HEADER_VALUE.fullmatch(key):
        raise ClientError(f"the API key ({API_KEY_VARIABLE} or `api_key`) holds spaces or characters beyond ASCII")
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def translated() -> Iterator[None]:
    """The one seam where httpx's errors become ours."""
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionFailedError(f"the service cannot be reached: {type(error).__name__}: {error}") from error
