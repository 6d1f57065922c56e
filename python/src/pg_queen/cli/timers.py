"""schedule, reschedule, cancel, list."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..types import Timer, TimerVerdict
from .moments import moment
from .output import instant, print_json, print_table
from .payload import AsBytes, AsText, FromFile, Payload, read_payload
from .session import REFUSED, AsJson, Url, fail, session

__all__ = ["cancel", "list_", "reschedule", "schedule"]

Queue = Annotated[str, typer.Argument(help="Queue.", show_default=False)]
Key = Annotated[str, typer.Argument(help="Key of the timer within its queue.", show_default=False)]
Delay = Annotated[
    str | None,
    typer.Option(
        "--delay", help="Due after this long: an interval such as '90 seconds', or seconds.", show_default=False
    ),
]
At = Annotated[
    str | None,
    typer.Option("--at", help="Due at this ISO 8601 time; local time when it has no offset.", show_default=False),
]


def schedule(
    queue: Queue,
    key: Key,
    payload: Payload = None,
    delay: Delay = None,
    at: At = None,
    partition: Annotated[str, typer.Option(help="Partition the message goes to.")] = "Default",
    txn: Annotated[str | None, typer.Option(help="A name of your own for the message.", show_default=False)] = None,
    file: FromFile = None,
    text: AsText = False,
    bytes_: AsBytes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Schedule a timer, or replace the pending one of this key."""
    what = read_payload(payload, file, text, bytes_)
    when = moment("--at", at)
    with session(url) as queen:
        _answer(queen.schedule(queue, key, what, delay, when, partition, txn), as_json)


def reschedule(
    queue: Queue, key: Key, delay: Delay = None, at: At = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Move a pending timer in time; its payload stays."""
    when = moment("--at", at)
    with session(url) as queen:
        _answer(queen.reschedule(queue, key, delay, when), as_json)


def cancel(queue: Queue, key: Key, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a pending timer."""
    with session(url) as queen:
        _answer(queen.cancel(queue, key), as_json)


def list_(
    queue: Queue,
    after: Annotated[str | None, typer.Option(help="Begin behind this key.", show_default=False)] = None,
    max_rows: Annotated[int, typer.Option(help="At most this many.")] = 100,
    all_: Annotated[bool, typer.Option("--all", help="Every pending timer, page by page.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the pending timers of a queue in byte order of their keys."""
    with session(url) as queen:
        if all_ and as_json:
            for timer in queen.iter_timers(queue, after):
                print_json(timer)
            return
        page = queen.list_timers(queue, after, max_rows)
        while page:
            _print_timers(page, as_json)
            if len(page) < max_rows:
                return
            after = page[-1].timer_key
            if not all_:
                break
            page = queen.list_timers(queue, after, max_rows)
    if not as_json:
        print("There may be more: --after with the last key, or --all.", file=sys.stderr)


def _print_timers(page: list[Timer], as_json: bool) -> None:
    if as_json:
        for timer in page:
            print_json(timer)
        return
    print_table(
        ("key", "partition", "due", "attempts", "claimed", "last error"),
        [(t.timer_key, t.partition, t.deliver_at, t.attempts, t.claimed, t.last_error) for t in page],
    )


def _answer(verdict: TimerVerdict, as_json: bool) -> None:
    name = f'timer "{verdict.timer_key}" of queue "{verdict.queue}"'
    if as_json:
        print_json(verdict)
        if not verdict.ok:
            raise typer.Exit(REFUSED)
    elif verdict.status == "absent":
        fail(REFUSED, f"absent: {name} is not pending", "It was never scheduled, was cancelled, or has been delivered.")
    elif verdict.status == "too_late":
        fail(REFUSED, f"too_late: a firer holds {name} at this moment", "It is about to be in the log.")
    else:
        due = f", due {instant(verdict.deliver_at)}" if verdict.deliver_at and verdict.status != "cancelled" else ""
        print(f"{verdict.status}: {name}{due}, message id {verdict.message_id}")
