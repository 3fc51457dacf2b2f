"""Which receivers the operator allows: hosts by name, and addresses by network."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from batchwright.client.documents.problems import FieldFault
from batchwright_service.errors import ConfigurationError, InvalidInputError

_PORTS = {"https": 443, "http": 80}
_WILDCARD = "*."
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
"""A host name, encoded by IDNA (`xn--...`), or an IP address."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses whose last 32 bits are an IPv4 address, behind NAT64 (RFC 6052)."""


@dataclass(frozen=True)
class _Origin:
    scheme: str
    host: str
    port: int

    def allows(self, url: httpx.URL) -> bool:
        same = (url.scheme, url.port or _PORTS[url.scheme]) == (self.scheme, self.port)
        suffix = self.host.removeprefix("*")
        host = _encoded_host(url)
        named = host.endswith(suffix) and host != suffix if self.host.startswith("*") else host == self.host
        return same and named


class AllowedReceivers:
    """The receivers that the operator allows.

    Args:
        hosts: hosts as ``BATCHWRIGHT_WEBHOOK_HOSTS`` lists them: ``host``, ``host:port`` or ``*.domain``, for https;
            with ``http://`` before it, for http.
        networks: private networks whose addresses are allowed, such as ``10.0.0.0/8``.

    Raises:
        ConfigurationError: naming an entry that is none.
    """

    def __init__(self, hosts: Sequence[str], networks: Sequence[str] = ()) -> None:
        self.hosts = tuple(hosts)
        self._origins = tuple(_origin(host) for host in hosts)
        self._networks = tuple(_network(text) for text in networks)

    def checked_url(self, text: str) -> httpx.URL:
        """Return the parsed address of a receiver.

        Raises:
            InvalidInputError: when it is no address of an allowed host.
        """
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            raise _refusal("is not a URL") from None
        if url.scheme not in _PORTS or not _HOST.fullmatch(_encoded_host(url)) or url.userinfo or url.fragment:
            raise _refusal("must be an https or http URL with a host, and without a user or a fragment")
        if not any(origin.allows(url) for origin in self._origins):
            allowed = ", ".join(self.hosts) or "none"
            raise _refusal(
                f"names a host that BATCHWRIGHT_WEBHOOK_HOSTS does not allow for {url.scheme}; allowed: "
                f"{allowed} (https if no scheme is given)"
            )
        return url

    def allows_address(self, text: str) -> bool:
        """Return whether messages may go to an IP address: a public one, or one of the allowed networks."""
        address = _unwrapped(ipaddress.ip_address(text.partition("%")[0]))
        if any(address in network for network in self._networks):
            return True
        is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
        return address.is_global and not (address.is_multicast or address.is_reserved or is_site_local)


def _origin(text: str) -> _Origin:
    explained = (
        f"BATCHWRIGHT_WEBHOOK_HOSTS: {text!r} is not a host such as hooks.example.org, *.example.org or host:8443"
    )
    with_scheme = text if "://" in text else f"https://{text}"
    try:
        url = httpx.URL(with_scheme.replace("://" + _WILDCARD, "://wildcard.", 1))
    except (httpx.InvalidURL, ValueError):
        raise ConfigurationError(explained) from None
    is_plain = url.scheme in _PORTS and url.raw_path in {b"", b"/"} and not url.query and not url.userinfo
    host = _encoded_host(url)
    if not is_plain or not _HOST.fullmatch(host):
        raise ConfigurationError(explained)
    if "://" + _WILDCARD in with_scheme:
        host = "*" + host.removeprefix("wildcard")
    return _Origin(url.scheme, host, url.port or _PORTS[url.scheme])


def _encoded_host(url: httpx.URL) -> str:
    """Return the host as it is sent; ``url.host`` would decode `xn--` names, and raise for those that it cannot."""
    return url.raw_host.decode("ascii")


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigurationError(f"BATCHWRIGHT_WEBHOOK_NETWORKS: {error}") from None


def _unwrapped(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = None if address.teredo is None else address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or teredo or address


def _refusal(message: str) -> InvalidInputError:
    return InvalidInputError(f"url: {message}", (FieldFault(field="url", message=message),))
