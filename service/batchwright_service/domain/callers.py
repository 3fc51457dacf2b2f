"""Callers of the API, and what each may do. Pure data, without a store or HTTP."""

from dataclasses import dataclass

from batchwright.client.documents.api_keys import Scope


@dataclass(frozen=True)
class Caller:
    """The sender of a request, as use cases check it and the audit log names it."""

    key_id: str | None = None
    """Id of the API key; none on a service that has no keys, and for the command line."""
    scopes: frozenset[Scope] = frozenset()
    """Scopes of the caller."""
    address: str | None = None
    """Address of the connection, where a route may change something; none for the command line."""
    key_name: str | None = None
    """Name of the API key, as pages show it."""

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_change(self, owner: str | None) -> bool:
        """Return whether the caller may change work of the key ``owner`` (none: work from before there were keys)."""
        return Scope.ADMIN in self.scopes or (owner is not None and owner == self.key_id)


KEYLESS = Caller(scopes=frozenset({Scope.ADMIN}))
"""Any caller on this machine, while the service has no keys."""
COMMAND_LINE = KEYLESS
"""An operator who works on the database directly."""
