"""Which addresses may be told: by host name, and by every way to write an address of this machine or its networks."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpcore
import pytest

from batchwright_service.errors import ConfigurationError, InvalidInputError
from batchwright_service.webhooks.receivers import AllowedReceivers
from batchwright_service.webhooks.sending import AddressRefusedError, CheckedBackend
from tests.support.service.processes import PATIENCE_SECONDS

HOSTS = ("hooks.example.org", "*.example.net", "http://plain.example.org", "ports.example.org:8443")


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.org",
        "https://hooks.example.org:443/told?by=us",
        "https://HOOKS.example.org/told",
        "https://a.example.net/",
        "https://a.b.example.net/",
        "http://plain.example.org/",
        "https://ports.example.org:8443/",
    ],
)
def test_listed_hosts_are_allowed(url: str) -> None:
    """With the scheme and the port of their entries."""
    assert AllowedReceivers(HOSTS).checked_url(url).host


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.org/",
        "https://hooks.example.org:8443/",
        "https://hooks.example.org./",
        "https://hooks.example.org.evil.example/",
        "https://evil.example/hooks.example.org",
        "https://hooks.example.org@evil.example/",
        "https://user:password@hooks.example.org/",
        "https://hooks.example.org/#part",
        "https://hooks.example.org\\@evil.example/",
        "https://example.net/",
        "https://evilexample.net/",
        "https://plain.example.org/",
        "https://ports.example.org/",
        "https://localhost/",
        "https://localhost./",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://*.example.net/",
        "ftp://hooks.example.org/",
        "file:///etc/passwd",
        "https:///told",
        "hooks.example.org",
        "https://[half/",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    """Whatever a reader may take for an allowed host, and every way to write one that is not listed."""
    with pytest.raises(InvalidInputError, match="url: "):
        AllowedReceivers(HOSTS).checked_url(url)


@pytest.mark.parametrize(
    "host", ["xn--bcher-kva.example", "xn--", "xn--a", "xn--99999999999", "xn--bcher-kva.xn--zz--", "\u00fc.example"]
)
def test_an_encoded_host_is_compared_as_it_is_sent(host: str) -> None:
    """Names in punycode, valid or not, never raise: they are allowed where they are listed, else refused."""
    with pytest.raises(InvalidInputError, match="url: "):
        AllowedReceivers(HOSTS).checked_url(f"https://{host}/told")
    with suppress(ConfigurationError):  # of a host that cannot be listed at all
        assert AllowedReceivers([host, f"*.{host}"]).checked_url(f"https://a.{host}/told")


@pytest.mark.parametrize(
    "host", ["https://", "a b", "ftp://hooks.example.org", "https://a/path", "a*.example.org", "*"]
)
def test_an_entry_that_is_no_host_is_named(host: str) -> None:
    """The operator learns of it when the service starts."""
    with pytest.raises(ConfigurationError, match="BATCHWRIGHT_WEBHOOK_HOSTS"):
        AllowedReceivers([host])
    with pytest.raises(ConfigurationError, match="BATCHWRIGHT_WEBHOOK_NETWORKS"):
        AllowedReceivers([], ["10.0.0.1/8"])


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",  # noqa: S104 - refused
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12:3456::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:db8::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_no_private_address_is_allowed(address: str) -> None:
    """Loopback, private, link-local, shared, reserved and multicast ones, also inside an IPv6 address."""
    assert not AllowedReceivers(HOSTS).allows_address(address)


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "2606:2800:220:1::", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    """Of both versions, and translated."""
    assert AllowedReceivers(HOSTS).allows_address(address)


def test_an_operator_allows_private_networks() -> None:
    """These alone, and the same address inside an IPv6 address."""
    receivers = AllowedReceivers(HOSTS, ["10.0.0.0/8", "fd00::/8"])
    assert all(receivers.allows_address(address) for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1"))
    assert not any(receivers.allows_address(address) for address in ("127.0.0.1", "192.168.1.1", "::1"))


def connect(host: str, allows: Callable[[str], bool], port: int = 9) -> object:
    """Connect to a host."""
    return CheckedBackend(allows, time.monotonic() + PATIENCE_SECONDS).connect_tcp(host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f000001", "017700000001", "127.1", "localhost", "::1"])
def test_however_a_host_is_written_its_address_is_checked(host: str) -> None:
    """The resolver of the system reads decimal, hexadecimal, octal and short forms: its answer counts, not the text."""
    with pytest.raises(AddressRefusedError, match="not public"):
        connect(host, AllowedReceivers(HOSTS).allows_address)


def test_a_host_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its addresses must be public, whichever would answer."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 9)) for address in ("93.184.215.14", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: found)
    with pytest.raises(AddressRefusedError, match=r"10\.0\.0\.1"):
        connect("two.example.org", AllowedReceivers(HOSTS).allows_address)


def test_the_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer of DNS (rebinding) is never asked for: the name is looked up once."""
    names: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        resolve = socket.getaddrinfo

        def rebinding(host: str, *args: Any, **named: Any) -> Any:
            names.append(host)
            return resolve("127.0.0.1" if host == "hooks.example.org" else host, *args, **named)

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        stream = connect("hooks.example.org", lambda address: address == "127.0.0.1", port)
        assert isinstance(stream, httpcore.NetworkStream)
        assert stream.get_extra_info("socket").getpeername() == ("127.0.0.1", port)
        stream.close()
    assert names == ["hooks.example.org", "127.0.0.1"]


def test_a_host_that_is_not_there_is_named() -> None:
    """Unknown names, and a port where nobody listens."""
    with pytest.raises(httpcore.ConnectError, match=r"none\.invalid"):
        connect("none.invalid", lambda _address: True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(httpcore.ConnectError, match=f"port {port}"):
        connect("127.0.0.1", lambda _address: True, port)
