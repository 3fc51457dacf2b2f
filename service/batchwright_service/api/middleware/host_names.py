"""Parse the Host header (RFC 9110, section 7.2): a name or an address, and an optional port."""

from __future__ import annotations

import ipaddress
import re

_MAX_LENGTH = 255 + len(":65535")
"""The longest valid name with a port."""
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{0,5}))?"
)
_LAST_PORT = 65_535


def host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case, without port and brackets; empty if it is invalid.

    Userinfo (`name@host`), percent escapes, spaces and other parts of URLs are invalid in a Host header.
    """
    found = _HOST.fullmatch(header) if len(header) <= _MAX_LENGTH else None
    if found is None or int(found["port"] or 0) > _LAST_PORT:
        return ""
    if not found["address"]:
        return found["name"].lower()
    try:
        return str(ipaddress.IPv6Address(found["address"]))
    except ValueError:
        return ""
