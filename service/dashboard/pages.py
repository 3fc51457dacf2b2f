"""Makes pages from templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.types import Scope as AsgiScope

from service.dashboard.assets import Assets
from service.domain.api_keys import Caller, Scope

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Visitor:
    """Who looks at a page, as its template sees it."""

    key_id: str | None
    """The API key that was signed in with; none without keys."""
    scopes: tuple[str, ...]
    """What it may do."""
    admin: bool
    """Whether it may do everything."""


class Pages:
    """Renders templates. Each knows ``static(name)``, ``version``, ``visitor`` (or none) and ``csrf_token``.

    Those that draw include ``charts.html`` in their head, which asks ``assets`` what plotly.js would add.
    """

    def __init__(self, assets: Assets, version: str) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._environment.globals |= {"static": assets.url, "version": version, "assets": assets}

    def render(self, template: str, scope: AsgiScope, context: Mapping[str, Any]) -> str:
        """The text of a page for who sent this request."""
        state = scope.get("state", {})
        about = {"visitor": _visitor(state.get("caller")), "csrf_token": state.get("csrf_token", "")}
        return self._environment.get_template(template).render({**about, **context})


def _visitor(caller: Caller | None) -> Visitor | None:
    if caller is None:
        return None
    return Visitor(caller.key_id, tuple(sorted(caller.scopes)), Scope.ADMIN in caller.scopes)
