"""The commands on the service's database: ``batchwright admin keys`` and ``batchwright admin prune``.

The command line imports this module also where the service's packages are not installed, so they are imported within
the functions that use them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.table import Column, Table

from batchwright.cli import options
from batchwright.cli.help import GroupHelp
from batchwright.cli.output import print_rows
from batchwright.client.documents.api_keys import MAX_DAYS, ApiKey, KeySubmission, Scope, check_name
from batchwright.errors import ServingError, SpecError
from batchwright.schemas.base import Document
from batchwright.schemas.field_errors import problems_in
from batchwright.units import counted
from batchwright_service.cli.serve import DatabaseUrl, reading_settings

if TYPE_CHECKING:
    from batchwright_service.application.api_keys import KeyCases
    from batchwright_service.settings import Settings
    from batchwright_service.store.store import Store

_VALID = "good"

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

keys = typer.Typer(
    cls=GroupHelp,
    help="Create, list and revoke the API keys of a service, directly in its database. The service need not run.",
    no_args_is_help=True,
)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key, such as the program that uses it.")],
    *,
    scope: Annotated[list[Scope], typer.Option("--scope", help="A scope of the key. May be repeated.")],
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0, max=MAX_DAYS, help="Days until the key expires. Default: never.")
    ] = None,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Create a key and print it, which is the only time it is shown. From the first key on, every caller needs one.

    Example: batchwright admin keys create scheduler --scope tunings:read --scope tunings:write --expires-in-days 90
    """
    submission = _submission(name, scope, expires_in_days)
    with _keys_in(database_url) as cases:
        created = cases.create(submission)
        has_admin = any(Scope.ADMIN in key.scopes and _state(key) == _VALID for key in cases.list().items)
    if not has_admin:
        sys.stderr.write(
            "Note: no key has the scope `admin`, so only this command can create keys. To create keys over "
            "HTTP, first run: batchwright admin keys create admin --scope admin\n"
        )
    print_created(created, created.key, f"{_key_text(created)}. Store it", json=json)


@keys.command("list")
def list_keys(*, database_url: DatabaseUrl = None, json: Json = False) -> None:
    """List all keys, revoked and expired ones included, without their secrets."""
    with _keys_in(database_url) as cases:
        found = cases.list().items
    print_rows(found, _table(found), json=json)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `keys list` shows it.")],
    *,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Revoke a key. Services refuse it within five seconds; work that it submitted continues."""
    with _keys_in(database_url) as cases:
        revoked = cases.revoke(key_id)
    text = revoked.model_dump_json(indent=2) if json else f"{_key_text(revoked)}."
    sys.stdout.write(text + "\n")


def prune(
    *,
    older_than: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Minimum time since the work ended, such as 30d, 12h or 90m.",
        ),
    ],
    recommendations: Annotated[
        bool,
        typer.Option(
            "--recommendations", help="Also delete recommendations of that age that no tuning or job refers to."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Delete tunings and jobs that ended long ago, with the folders of these jobs on this host.

    Works directly on the service's database, also while the service runs. Recommendations stay unless
    --recommendations is given, but a deleted tuning serves no later submission.

    Example: batchwright admin prune --older-than 30d --dry-run
    """
    with opened(database_url) as (store, settings):
        from batchwright_service.application import retention  # noqa: PLC0415 - see the module's docstring
        from batchwright_service.application.job_files import JobFiles  # noqa: PLC0415 - see the module's docstring

        files = JobFiles(settings.runs_dir)
        report = retention.prune(store.retention, files, older_than, recommendations=recommendations, dry_run=dry_run)
    verb = "Would delete" if report.dry_run else "Deleted"
    counts = (
        f"{counted(report.tunings, 'tuning')}, {counted(report.jobs, 'job')}, "
        f"{counted(report.recommendations, 'recommendation')}"
    )
    folders = "".join(f"\n  {folder}" for folder in report.folders)
    left = "".join(f"\nCould not be removed: {folder}" for folder in report.folders_left)
    text = f"{verb} {counts}, {counted(len(report.folders), 'folder')}{':' if folders else '.'}{folders}{left}"
    sys.stdout.write((report.model_dump_json(indent=2) if json else text) + "\n")


@contextmanager
def opened(database_url: str | None) -> Iterator[tuple[Store, Settings]]:
    """Open the store of the settings, migrated to the newest schema, and yield it with the settings.

    Raises:
        SpecError: when the settings are invalid.
        ServingError: when the service raises an error, with its message.
    """
    from batchwright_service.store.store import open_store  # noqa: PLC0415 - see the module's docstring

    with reading_settings({"database_url": database_url}) as settings, closing(open_store(settings.url)) as store:
        yield store, settings


def print_created(created: Document, secret: str, description: str, *, json: bool) -> None:
    """Print a document with a secret that is shown once: as JSON, or the secret alone on standard output."""
    if json:
        sys.stdout.write(created.model_dump_json(indent=2) + "\n")
    else:
        sys.stderr.write(f"{description} safely: it is not shown again.\n")
        sys.stdout.write(secret + "\n")


@contextmanager
def _keys_in(database_url: str | None) -> Iterator[KeyCases]:
    """Open the use cases of keys of a database; raises as ``opened``."""
    from batchwright_service.application.api_keys import KeyCases  # noqa: PLC0415 - see the module's docstring

    with opened(database_url) as (store, _):
        yield KeyCases(store.keys)


def _submission(name: str, scopes: list[Scope], expires_in_days: float | None) -> KeySubmission:
    """Return the submission of a key."""
    try:
        return KeySubmission(
            name=check_name(name), scopes=tuple(dict.fromkeys(scopes)), expires_in_days=expires_in_days
        )
    except ValidationError as error:
        raise SpecError(problems_in(error, kind=KeySubmission), "the key") from None
    except ValueError as error:
        raise ServingError(f"NAME {error}") from None


def _key_text(key: ApiKey) -> str:
    until = "" if key.expires_at is None else f", until {key.expires_at:%Y-%m-%d %H:%M} UTC"
    return f"Key {key.id} ({key.name}) for {', '.join(key.scopes)}{until}: {_state(key)}"


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d %H:%M}"
    return "expired" if key.expires_at is not None and key.expires_at <= datetime.now(UTC) else _VALID


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
