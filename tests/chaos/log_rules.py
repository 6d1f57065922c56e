"""What must hold of the log, its groups and the dead letters. Each rule yields what breaks it."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator

from .run import Run, mark_of


def log_is_whole(run: Run) -> Iterator[str]:
    """Offsets of a partition are 1 to N."""
    places: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for message in run.final.log:
        places[message.tenant, message.queue, message.partition].append(message.offset)
    for place, offsets in places.items():
        if sorted(offsets) != list(range(1, len(offsets) + 1)):
            yield f"offsets of {place} are not 1 to {len(offsets)}"


def consumed(run: Run) -> Iterator[str]:
    """Each message reaches each group or its dead letters as what it is, and never again after a confirmed ack."""
    at = {(m.tenant, m.queue, m.partition, m.offset): m for m in run.final.log}
    groups = {(c.tenant, c.queue, c.asked["group"]) for c in run.calls if c.op == "pop" and c.ok}
    # How far a group had come, by the time it was told so.
    told: dict[tuple[str, ...], list[tuple[float, int]]] = defaultdict(list)
    for call in sorted((c for c in run.calls if c.op in ("ack", "nack") and c.ok), key=lambda c: c.until):
        if call.answer.get("committed") is not None:
            acks = told[call.tenant, call.queue, call.asked["group"], call.asked["partition"]]
            acks.append((call.until, max(call.answer["committed"], acks[-1][1] if acks else 0)))
    seen: set[tuple[str, str, str, str, int]] = set()
    for call in (c for c in run.calls if c.op == "pop" and c.ok):
        for got in call.answer:
            partition, offset = got["partition"], got["offset"]
            seen.add((call.tenant, call.queue, call.asked["group"], partition, offset))
            message = at.get((call.tenant, call.queue, partition, offset))
            if message is None or got["message_id"] != message.message_id or got["payload"] != message.payload:
                yield f"delivered {got}, in the log is {message}"
            acks = told[call.tenant, call.queue, call.asked["group"], partition]
            before = bisect.bisect_left(acks, (call.begin, 0))
            if before and offset <= acks[before - 1][1]:
                yield f"{partition}/{offset} of {call.queue} came again, {call.client}/{call.number}, after its ack"
    letters = {(x.tenant, x.queue, x.group, x.partition, x.offset) for x in run.final.letters}
    for tenant, queue, group in groups:
        for message in run.final.log:
            where = (tenant, queue, group, message.partition, message.offset)
            if (message.tenant, message.queue) == (tenant, queue) and where not in seen and where not in letters:
                yield f"{message} never reached group {group}"


def letters_are_whole(run: Run) -> Iterator[str]:
    """A dead letter carries the payload of what died."""
    by_id = {message.message_id: message for message in run.final.log}
    for letter in run.final.letters:
        message = by_id.get(letter.message_id)
        call = run.sent.get(mark_of(letter))
        payload = message.payload if message is not None else call.asked["payload"] if call is not None else None
        if payload is None or letter.payload != payload:
            yield f"{letter} is not what died"
