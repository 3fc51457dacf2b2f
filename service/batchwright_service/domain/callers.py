"""Callers of the API, and what each may do. Pure data, without a store or HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.client.documents.api_keys import Scope


@dataclass(frozen=True)
class Actor:
    """The caller of an act."""

    key_id: str | None = None
    """Id of the API key; none on a service without keys, and for the command line."""
    address: str | None = None
    """Address of the connection; none for the command line."""


COMMAND_LINE = Actor()
"""An operator who works on the database directly."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    key_id: str | None
    """Id of the API key of the request; none on a service that has no keys."""
    scopes: frozenset[Scope]
    """Scopes of the caller."""
    address: str | None = None
    """Address from which the request came, where a route may change something; none where that is not known."""

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        return Actor(self.key_id, self.address)

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_change(self, owner: str | None) -> bool:
        """Return whether the caller may change work of the key ``owner`` (none: work from before there were keys)."""
        return Scope.ADMIN in self.scopes or (owner is not None and owner == self.key_id)


KEYLESS = Caller(key_id=None, scopes=frozenset({Scope.ADMIN}))
"""Any caller on this machine, while the service has no keys."""
