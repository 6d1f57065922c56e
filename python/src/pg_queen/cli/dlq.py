"""dlq list, dlq requeue, dlq purge."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import InvalidArgument
from ..types import DeadLetter
from .output import print_json, print_table
from .session import AsJson, Url, session

__all__ = ["list_", "purge", "requeue"]

Queue = Annotated[str, typer.Argument(help="Queue.", show_default=False)]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of dead letters.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]


def list_(
    queue: Queue,
    after: Annotated[str | None, typer.Option(help="Begin behind this id.", show_default=False)] = None,
    max_rows: Annotated[int, typer.Option(help="At most this many.")] = 100,
    all_: Annotated[bool, typer.Option("--all", help="Every dead letter, page by page.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of a queue by id."""
    with session(url) as queen:
        while True:
            page = queen.dlq_list(queue, after, max_rows)
            _print_letters(page, as_json)
            if len(page) < max_rows:
                return
            after = str(page[-1].id)
            if not all_:
                break
    if not as_json:
        print("There may be more: --after with the last id, or --all.", file=sys.stderr)


def requeue(queue: Queue, ids: Ids = None, all_: All = False, url: Url = None, as_json: AsJson = False) -> None:
    """Append dead letters to their partitions again, for every group."""
    chosen = _chosen(ids, all_)
    with session(url) as queen:
        _answer("requeued", queen.dlq_requeue(queue, chosen), as_json)


def purge(queue: Queue, ids: Ids = None, all_: All = False, url: Url = None, as_json: AsJson = False) -> None:
    """Delete dead letters."""
    chosen = _chosen(ids, all_)
    with session(url) as queen:
        _answer("purged", queen.dlq_purge(queue, chosen), as_json)


def _chosen(ids: list[str] | None, all_: bool) -> list[str] | None:
    if bool(ids) == all_:
        raise InvalidArgument(
            "both ids and --all are given" if ids else "neither ids nor --all is given",
            hint="Name the ids that pg-queen dlq list shows, or give --all.",
        )
    return ids or None


def _answer(done: str, letters: int, as_json: bool) -> None:
    if as_json:
        print_json({done: letters})
    else:
        print(f"{done}: {letters} dead letter{'' if letters == 1 else 's'}")


def _print_letters(page: list[DeadLetter], as_json: bool) -> None:
    if as_json:
        for letter in page:
            print_json(letter)
    elif page:
        print_table(
            ("id", "group", "partition", "offset", "attempts", "failed", "error"),
            [(d.id, d.consumer_group, d.partition, d.offset, d.attempts, d.failed_at, d.error) for d in page],
        )
