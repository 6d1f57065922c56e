"""push, pop, seek."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..types import Message
from .moments import moment
from .output import print_json, print_table
from .payload import AsBytes, AsText, FromFile, Payload, read_payload
from .session import REFUSED, AsJson, Url, fail, session

__all__ = ["pop", "push", "seek"]

Queue = Annotated[str, typer.Argument(help="Queue.", show_default=False)]


def push(
    queue: Queue,
    payload: Payload = None,
    partition: Annotated[str, typer.Option(help="Partition the message goes to.")] = "Default",
    txn: Annotated[
        str | None,
        typer.Option(
            help="A name of your own for the message; the same name again is a duplicate.", show_default=False
        ),
    ] = None,
    file: FromFile = None,
    text: AsText = False,
    bytes_: AsBytes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Append a message to the log now."""
    what = read_payload(payload, file, text, bytes_)
    with session(url) as queen:
        result = queen.push(queue, what, partition, txn)
    if as_json:
        print_json(result)
    else:
        print(
            f'{result.status}: offset {result.offset} of partition "{result.partition}", message id {result.message_id}'
        )


def pop(
    queue: Queue,
    group: Annotated[str, typer.Option(help="Consumer group.")] = "default",
    max_messages: Annotated[int, typer.Option("--max", help="At most this many messages.")] = 100,
    lease: Annotated[str, typer.Option(help="How long the messages are yours: an interval.")] = "30 seconds",
    partition: Annotated[str | None, typer.Option(help="Only this partition.", show_default=False)] = None,
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge the messages once they are printed.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Take messages from the log and print them."""
    with session(url) as queen:
        messages = queen.pop(queue, group, max_messages, lease, partition)
        if not messages:
            if not as_json:
                print(
                    f'No message: queue "{queue}" has nothing for group "{group}" now, or does not exist.',
                    file=sys.stderr,
                )
            return
        _print_messages(messages, as_json)
        # Printed before acknowledged: when the output goes nowhere, the messages are delivered again.
        sys.stdout.flush()
        if ack:
            for held, lease_id in dict.fromkeys((message.partition, message.lease_id) for message in messages):
                result = queen.ack(queue, group, held, str(lease_id))
                if not result.ok:
                    fail(
                        REFUSED,
                        f'{result.status}: partition "{held}" was not acknowledged, its messages are delivered again',
                        "The lease ran out before the output was taken; give a longer --lease.",
                    )
    if not ack and not as_json:
        print(
            f"{len(messages)} leased for {lease}, not acknowledged, so they are delivered again; --ack acknowledges.",
            file=sys.stderr,
        )


def seek(
    queue: Queue,
    group: Annotated[str, typer.Option(help="Consumer group.")] = "default",
    to_offset: Annotated[
        int | None, typer.Option(help="Next offset to deliver; 0 is the beginning.", show_default=False)
    ] = None,
    to_time: Annotated[
        str | None, typer.Option(help="Deliver what was appended then or later: ISO 8601.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Only this partition.", show_default=False)] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move a consumer group, back to read again or forward to skip."""
    when = moment("--to-time", to_time)
    with session(url) as queen:
        moved = queen.seek(queue, group, to_offset, when, partition)
    if as_json:
        print_json({"moved": moved})
    else:
        print(f'moved: group "{group}" in {moved} partition{"" if moved == 1 else "s"} of queue "{queue}"')


def _print_messages(messages: list[Message], as_json: bool) -> None:
    if as_json:
        for message in messages:
            print_json(message)
        return
    print_table(
        ("partition", "offset", "created", "delivery", "payload"),
        [
            (
                m.partition,
                m.offset,
                m.created_at,
                m.delivery_attempt,
                m.payload if m.payload_bytes is None else m.payload_bytes,
            )
            for m in messages
        ],
    )
