"""The command ``pg-queen``. One concern a file; this one puts the commands together."""

from __future__ import annotations

import typer

from . import dlq, log, operator, timers
from .session import guarded

__all__ = ["app", "main"]

app = typer.Typer(
    name="pg-queen",
    help="Durable timers and a partitioned message log inside PostgreSQL.",
    epilog=(
        "The server is named by --url, or by the PG* variables and PGSERVICE as for psql. "
        "Exit codes: 0 done; 1 refused by the state of things (absent, too_late, lease_lost) or found wrong by doctor; "
        "2 bad usage or argument; 3 database error; 4 cannot connect; 5 the extension is not installed or cannot be; "
        "6 not permitted; 74 the output could not be written."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("install")(guarded(operator.install))
app.command("start")(guarded(operator.start))
app.command("stop")(guarded(operator.stop))
app.command("status")(guarded(operator.status))
app.command("doctor")(guarded(operator.doctor))
app.command("schedule")(guarded(timers.schedule))
app.command("reschedule")(guarded(timers.reschedule))
app.command("cancel")(guarded(timers.cancel))
app.command("list")(guarded(timers.list_))
app.command("push")(guarded(log.push))
app.command("pop")(guarded(log.pop))
app.command("seek")(guarded(log.seek))

dead_letters = typer.Typer(help="Dead letters: list, requeue, purge.", no_args_is_help=True, rich_markup_mode=None)
dead_letters.command("list")(guarded(dlq.list_))
dead_letters.command("requeue")(guarded(dlq.requeue))
dead_letters.command("purge")(guarded(dlq.purge))
app.add_typer(dead_letters, name="dlq")


def main() -> None:
    """Entry point of the command."""
    app(prog_name="pg-queen")
