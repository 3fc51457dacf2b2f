"""The commands that work on the service's database: ``batchwright keys`` and ``batchwright prune``.

Part of the command line, which imports this module before it knows whether the service's packages are installed: they
are imported where they are needed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Column, Table

from service.domain.api_keys import LONGEST_DAYS, ApiKey, KeySubmission, Scope, check_name
from tuner.errors import ServingError, SpecError
from tuner.schemas.field_errors import problems_in

if TYPE_CHECKING:
    from service.application.api_keys import KeyCases
    from service.application.retention import PruneReport
    from service.settings import Settings
    from service.store.store import Store

_SECONDS_PER_DAY = 86_400.0
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": _SECONDS_PER_DAY, "w": 7 * _SECONDS_PER_DAY}
_SHOWN_LENGTH = 40
_GOOD = "good"

_DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="SQLAlchemy URL of the service's store. When left out: BATCHWRIGHT_DATABASE_URL, else the SQLite file in "
        "the data folder."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

keys = typer.Typer(
    help="Make, list and revoke the API keys of a service. Works on its database directly; no service need run.",
    no_args_is_help=True,
)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Who or what the key is for, in your words.")],
    *,
    scope: Annotated[list[Scope], typer.Option("--scope", help="What it may be used for. May be repeated.")],
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0, max=LONGEST_DAYS, help="Days until it expires; never when left out.")
    ] = None,
    database_url: _DatabaseUrl = None,
    json: _Json = False,
) -> None:
    """Make a key and print it: this is the only time it is shown. From the first key on, every caller needs one.

    Example: batchwright keys create scheduler --scope tunings:read --scope tunings:write --expires-in-days 90
    """
    submission = _submission(name, scope, expires_in_days)
    with _keys_in(database_url) as cases:
        made = cases.create(submission)
        can_make_others = any(Scope.ADMIN in key.scopes and _state(key) == _GOOD for key in cases.list().items)
    if not can_make_others:
        sys.stderr.write(
            "Note: no key has the scope `admin`, so that keys can be made with this command alone; for one that makes "
            "others over HTTP: batchwright keys create admin --scope admin\n"
        )
    if json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
    else:
        sys.stderr.write(f"{_in_words(made)}. Keep it safe: it is not shown again.\n")
        sys.stdout.write(made.key + "\n")


@keys.command("list")
def list_keys(*, database_url: _DatabaseUrl = None, json: _Json = False) -> None:
    """List every key there ever was, without what makes it a key."""
    with _keys_in(database_url) as cases:
        found = cases.list().items
    if json:
        sys.stdout.writelines(key.model_dump_json() + "\n" for key in found)
    else:
        Console(highlight=False, markup=False).print(_table(found))


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, as `keys list` shows it.")],
    *,
    database_url: _DatabaseUrl = None,
    json: _Json = False,
) -> None:
    """End a key for good. Services refuse it within five seconds; what it submitted goes on."""
    with _keys_in(database_url) as cases:
        ended = cases.revoke(key_id)
    text = ended.model_dump_json(indent=2) if json else f"{_in_words(ended)}."
    sys.stdout.write(text + "\n")


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if seconds > LONGEST_DAYS * _SECONDS_PER_DAY:
        shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
        raise typer.BadParameter(f"{shown!r} is no time up to ten years: write for example 30d, 12h or 90m")
    return seconds


def prune(
    *,
    older_than: Annotated[
        float,
        typer.Option(
            parser=_seconds, metavar="TIME", help="How long ago it must have ended: 30d, 12h, 90m; also s and w."
        ),
    ],
    recommendations: Annotated[
        bool, typer.Option("--recommendations", help="Also recommendations as old that no tuning and no job names.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    database_url: _DatabaseUrl = None,
    json: _Json = False,
) -> None:
    """Delete tunings and jobs that ended long ago, with the folders of these jobs on this host.

    Works on the service's database directly, beside a service that runs. Recommendations stay, unless asked for; but a
    tuning that is deleted answers no later submission.

    Example: batchwright prune --older-than 30d --dry-run
    """
    with _opened(database_url) as (store, settings):
        from service.application import retention  # noqa: PLC0415 - see the module's docstring
        from service.application.job_files import RunFiles  # noqa: PLC0415 - likewise

        files = RunFiles(settings.runs_dir)
        report = retention.prune(store.retention, files, older_than, recommendations=recommendations, dry_run=dry_run)
    sys.stdout.write((report.model_dump_json(indent=2) if json else _report_in_words(report)) + "\n")


def _report_in_words(report: PruneReport) -> str:
    told = "Would delete" if report.dry_run else "Deleted"
    counts = f"{report.tunings} tunings, {report.jobs} jobs, {report.recommendations} recommendations"
    folders = "".join(f"\n  {folder}" for folder in report.folders)
    left = "".join(f"\nCould not be removed: {folder}" for folder in report.folders_left)
    return f"{told} {counts}, {len(report.folders)} folders{':' if folders else '.'}{folders}{left}"


@contextmanager
def _opened(database_url: str | None) -> Iterator[tuple[Store, Settings]]:
    """The store in the database that the settings name, in its newest schema, and the settings.

    Raises:
        SpecError: when the settings are wrong.
        ServingError: when the store refuses, in its words.
    """
    from service.errors import ServiceError  # noqa: PLC0415 - see the module's docstring
    from service.settings import read_settings  # noqa: PLC0415 - likewise
    from service.store.store import open_store  # noqa: PLC0415 - likewise

    settings = read_settings(database_url=database_url)
    try:
        store = open_store(settings.url)
        try:
            yield store, settings
        finally:
            store.close()
    except ServiceError as error:
        raise ServingError(str(error)) from None


@contextmanager
def _keys_in(database_url: str | None) -> Iterator[KeyCases]:
    """What can be done with the keys in that database; raises what ``_opened`` does."""
    from service.application.api_keys import KeyCases  # noqa: PLC0415 - see the module's docstring

    with _opened(database_url) as (store, _):
        yield KeyCases(store.keys)


def _submission(name: str, scopes: list[Scope], expires_in_days: float | None) -> KeySubmission:
    """The key that is asked for.

    Raises:
        ServingError: naming the argument at fault.
    """
    try:
        return KeySubmission(
            name=check_name(name), scopes=tuple(dict.fromkeys(scopes)), expires_in_days=expires_in_days
        )
    except ValidationError as error:
        raise SpecError(problems_in(error, kind=KeySubmission), "the key") from None
    except ValueError as error:
        raise ServingError(f"NAME {error}") from None


def _in_words(key: ApiKey) -> str:
    until = "" if key.expires_at is None else f", until {key.expires_at:%Y-%m-%d %H:%M} UTC"
    return f"Key {key.id} ({key.name}) for {', '.join(key.scopes)}{until}: {_state(key)}"


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d %H:%M}"
    return "expired" if key.expires_at is not None and key.expires_at <= datetime.now(UTC) else _GOOD


def _table(found: Sequence[ApiKey]) -> Table:
    table = Table(
        Column("id", no_wrap=True),
        "name",
        Column("scopes", overflow="fold"),
        "created (UTC)",
        "expires",
        "last used",
        "state",
        box=None,
    )
    for key in found:
        times = (key.created_at, key.expires_at, key.last_used_at)
        shown = ("-" if moment is None else f"{moment:%Y-%m-%d %H:%M}" for moment in times)
        table.add_row(key.id, key.name, ", ".join(key.scopes), *shown, _state(key))
    return table
