"""Rendering of pages from templates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.types import Scope as AsgiScope

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.states import State
from batchwright.schemas.requests import Objective
from batchwright.schemas.workload import Precision
from batchwright_service.dashboard.assets import Assets
from batchwright_service.domain.callers import Caller

_TEMPLATES = Path(__file__).parent / "templates"
_CHOICES = {
    "states": tuple(State),
    "precisions": get_args(Precision),
    "objectives": get_args(Objective),
    "actions": tuple(AuditAction),
}
"""Values among which the filters of lists choose."""


@dataclass(frozen=True)
class Visitor:
    """The signed-in caller, as a template sees it."""

    key_id: str | None
    """The id of the signed-in API key; None on a service without keys."""
    key_name: str | None
    """The name of this key."""
    scopes: tuple[str, ...]
    """The scopes of the key."""
    admin: bool
    """True if the key has the scope `admin`."""


class Pages:
    """Renders templates. Each has ``static(name)``, ``version``, ``choices``, ``visitor`` (or None) and ``csrf_token``.

    Templates with charts include ``charts.html`` in their head, which needs ``assets``.
    """

    def __init__(self, assets: Assets, version: str) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._environment.globals |= {"static": assets.url, "version": version, "assets": assets, "choices": _CHOICES}

    def render(self, template: str, scope: AsgiScope, context: Mapping[str, Any]) -> str:
        """Return the HTML of a page for the caller of a request."""
        state = scope.get("state", {})
        caller: Caller | None = state.get("caller")
        visitor = caller and Visitor(
            caller.key_id, caller.key_name, tuple(sorted(caller.scopes)), Scope.ADMIN in caller.scopes
        )
        shared = {"visitor": visitor, "csrf_token": state.get("csrf_token", "")}
        return self._environment.get_template(template).render({**shared, **context})
