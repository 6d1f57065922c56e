"""A history and its end, and the ways to look at them that the rules share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from .history import Call, Final, Letter, Message, Pending

__all__ = ["Key", "Run", "accepted", "mark_of"]

Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Run:
    """A history and its end. ``margin``: how far the server's time function was from the clock at most, in seconds."""

    calls: Sequence[Call]
    final: Final
    margin: float = 1.0

    @cached_property
    def sent(self) -> dict[str, Call]:
        """Schedules and pushes by the mark in their payload."""
        return {c.asked["payload"]["v"]: c for c in self.calls if c.op in ("schedule", "push")}

    @cached_property
    def by_key(self) -> dict[Key, list[Call]]:
        """Calls on a timer, by tenant, queue and key."""
        found: dict[Key, list[Call]] = defaultdict(list)
        for call in self.calls:
            if call.op in ("schedule", "reschedule", "cancel"):
                found[call.tenant, call.queue, call.asked["key"]].append(call)
        return found

    @cached_property
    def marks(self) -> dict[str, str]:
        """Marks of versions by message id, from answers and from what arrived."""
        found = {
            str(c.answer["message_id"]): mark for mark, c in self.sent.items() if c.ok and c.answer.get("message_id")
        }
        things: list[Message | Pending | Letter] = [*self.final.log, *self.final.pending, *self.final.letters]
        for thing in things:
            found.setdefault(thing.message_id, mark_of(thing))
        return found

    @cached_property
    def arrived(self) -> dict[str, list[Message]]:
        """First sendings in the final log, by mark; a letter sent again is another message."""
        found: dict[str, list[Message]] = defaultdict(list)
        for message in self.final.log:
            if not message.txn.startswith("dlq:"):
                found[mark_of(message)].append(message)
        return found

    @cached_property
    def dead(self) -> dict[str, list[Letter]]:
        """Timers among the dead letters, by mark."""
        found: dict[str, list[Letter]] = defaultdict(list)
        for letter in self.final.letters:
            if letter.group == "__timer__":
                found[mark_of(letter)].append(letter)
        return found

    @cached_property
    def waiting(self) -> dict[str, Pending]:
        """What is pending, by mark."""
        return {mark_of(timer): timer for timer in self.final.pending}

    def timers(self) -> Iterator[tuple[str, Call]]:
        """Marks and calls of schedules."""
        return ((mark, call) for mark, call in self.sent.items() if call.op == "schedule")


def mark_of(thing: Message | Pending | Letter) -> str:
    return str(thing.payload.get("v")) if isinstance(thing.payload, dict) else repr(thing.payload)


def accepted(call: Call) -> bool:
    """Whether it made or may have made something: not refused, and no verdict that says so."""
    return call.outcome == "unknown" or (call.ok and call.status in ("scheduled", "rescheduled", "queued"))
