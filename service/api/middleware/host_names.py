"""The Host header, read as RFC 9110 (section 7.2) writes it: a name or an address, and a port, and nothing else."""

from __future__ import annotations

import ipaddress
import re

_LONGEST = 255 + len(":65535")
"""No legal name is longer."""
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{0,5}))?"
)
_LAST_PORT = 65_535


def host_name(header: str) -> str:
    """The name or address in a Host header, in lower case, without port and brackets; empty when it is none.

    Userinfo (`name@host`), percent escapes, spaces and whatever else URLs may hold are no part of a Host.
    """
    found = _HOST.fullmatch(header) if len(header) <= _LONGEST else None
    if found is None or int(found["port"] or 0) > _LAST_PORT:
        return ""
    return _address(found["address"]) if found["address"] else found["name"].lower()


def _address(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        return ""
