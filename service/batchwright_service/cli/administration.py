"""The group ``batchwright admin``: the commands that work on the service's database."""

import typer

from batchwright.cli.help import GroupHelp
from batchwright_service.cli.admin import keys, prune
from batchwright_service.cli.stored_recommendations import recommendations
from batchwright_service.cli.webhooks import webhooks

admin = typer.Typer(
    cls=GroupHelp,
    help="Administer a service directly in its database, on its own machine. The service need not run.",
    no_args_is_help=True,
)
admin.add_typer(keys, name="keys")
admin.command()(prune)
admin.add_typer(recommendations, name="recommendations")
admin.add_typer(webhooks, name="webhooks")
