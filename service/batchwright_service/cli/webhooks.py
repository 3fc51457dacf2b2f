"""The command on webhooks: ``batchwright admin webhooks``, directly on the service's database.

The command line imports this module also where the service's packages are not installed, so they are imported within
the functions that use them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.table import Column, Table

from batchwright.cli.help import GroupHelp
from batchwright.cli.output import print_rows
from batchwright.client.documents.webhooks import (
    ENDINGS,
    Delivery,
    DeliveryState,
    Webhook,
    WebhookEvent,
    WebhookSubmission,
)
from batchwright.errors import SpecError
from batchwright.schemas.field_errors import problems_in
from batchwright_service.cli.admin import Json, opened, print_created
from batchwright_service.cli.serve import DatabaseUrl
from batchwright_service.domain.callers import KEYLESS

if TYPE_CHECKING:
    from batchwright_service.webhooks.management import WebhookCases

_ROWS_AT_ONCE = 200
_WebhookId = Annotated[str, typer.Argument(metavar="ID", help="Id of the webhook, as `webhooks list` shows it.")]

webhooks = typer.Typer(
    cls=GroupHelp,
    help="Register, list and remove the webhooks of a service, and look into their deliveries, directly in its "
    "database. The service need not run, but it alone delivers.",
    no_args_is_help=True,
)


@webhooks.command()
def add(  # noqa: PLR0913 - options of a command
    url: Annotated[
        str, typer.Argument(help="Address that gets the messages. Its host must be in BATCHWRIGHT_WEBHOOK_HOSTS.")
    ],
    *,
    name: Annotated[str, typer.Option(help="Name of the webhook, shown in lists.")] = "",
    event: Annotated[
        list[WebhookEvent] | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            help=f"One of {', '.join(ENDINGS)}. May be repeated. Default: all events.",
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only report work of this project.")] = None,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Register a webhook and print its secret, which is the only time it is shown.

    Example: batchwright admin webhooks add https://hooks.example.org/tunings --event job.failed
    """
    try:
        submission = WebhookSubmission(url=url, name=name, events=tuple(dict.fromkeys(event or [])), project=project)
    except ValidationError as error:
        raise SpecError(problems_in(error, kind=WebhookSubmission), "the webhook") from None
    with _cases(database_url) as cases:
        created = cases.create(submission, KEYLESS)
    description = f"Webhook {created.id} to {created.url}. Store its secret"
    print_created(created, created.secret, description, json=json)


@webhooks.command("list")
def list_webhooks(*, database_url: DatabaseUrl = None, json: Json = False) -> None:
    """List all webhooks, without their secrets, with the counts of what is not delivered."""
    with _cases(database_url) as cases:
        found = cases.list().items
    print_rows(found, _webhook_table(found), json=json)


@webhooks.command()
def remove(webhook_id: _WebhookId, *, database_url: DatabaseUrl = None) -> None:
    """Remove a webhook with its messages, those that are not delivered included."""
    with _cases(database_url) as cases:
        cases.delete(webhook_id, KEYLESS)
    sys.stdout.write(f"Removed {webhook_id}.\n")


@webhooks.command()
def deliveries(
    webhook_id: _WebhookId,
    *,
    state: Annotated[DeliveryState | None, typer.Option(help="Only messages in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages, newest first.")] = 50,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """List the messages to a webhook, with the error of their last attempt.

    Example: batchwright admin webhooks deliveries whk_0192f3a1b2c3700089abcdef01234567 --state dead
    """
    with _cases(database_url) as cases:
        found = list(itertools.islice(_deliveries(cases, webhook_id, state), limit))
    print_rows(found, _delivery_table(found), json=json)


@webhooks.command()
def resend(
    webhook_id: _WebhookId,
    delivery_id: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="Id of a message. Default: all dead ones.")
    ] = None,
    *,
    database_url: DatabaseUrl = None,
) -> None:
    """Send a message again, or all dead ones of a webhook, each with all attempts before it."""
    with _cases(database_url) as cases:
        dead = [] if delivery_id else [each.id for each in _deliveries(cases, webhook_id, DeliveryState.DEAD)]
        ids = [delivery_id] if delivery_id else dead
        for name in ids:
            cases.send_again(webhook_id, name)
    sys.stdout.write(f"Sending {len(ids)} {'message' if len(ids) == 1 else 'messages'} again.\n")


def _deliveries(cases: WebhookCases, webhook_id: str, state: DeliveryState | None) -> Iterator[Delivery]:
    cursor = None
    while True:
        page = cases.deliveries(webhook_id, _ROWS_AT_ONCE, cursor, state)
        yield from page.items
        if (cursor := page.next_cursor) is None:
            return


@contextmanager
def _cases(database_url: str | None) -> Iterator[WebhookCases]:
    """Open the use cases of webhooks of a database; raises as ``opened``."""
    from batchwright_service.webhooks.management import WebhookCases  # noqa: PLC0415 - see the module's docstring
    from batchwright_service.webhooks.receivers import AllowedReceivers  # noqa: PLC0415 - see the module's docstring

    with opened(database_url) as (store, settings):
        receivers = AllowedReceivers(settings.webhook_hosts, settings.webhook_networks)
        yield WebhookCases(store.webhooks, store.deliveries, receivers)


def _webhook_table(found: Sequence[Webhook]) -> Table:
    id_, address = Column("id", no_wrap=True), Column("address", overflow="fold")
    events = Column("events", overflow="fold")
    table = Table(id_, "name", address, events, "project", "pending", "dead", box=None)
    for webhook in found:
        reported = ", ".join(webhook.events) or "all"
        counts = str(webhook.pending), str(webhook.dead)
        table.add_row(webhook.id, webhook.name or "-", webhook.url, reported, webhook.project or "all", *counts)
    return table


def _delivery_table(found: Sequence[Delivery]) -> Table:
    table = Table(
        Column("id", no_wrap=True), "event", "of", "created (UTC)", "state", "attempts", "next (UTC)", "error", box=None
    )
    for delivery in found:
        table.add_row(
            delivery.id,
            delivery.event,
            delivery.work_id or "-",
            _moment(delivery.created_at),
            delivery.state,
            str(delivery.attempts),
            _moment(delivery.next_attempt_at),
            delivery.last_error or "-",
        )
    return table


def _moment(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
