"""What the clients of a chaos run wrote down, and what was there at its end.

A history is a file of JSON lines, one a call, written by the client that made it: before the call a line that says what
is about to be asked, so that a client that is killed leaves a call whose outcome is unknown, and after it the same with
outcome and answer. Times are seconds since the epoch by the machine's clock, on which clients and server run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Call", "Final", "Letter", "Message", "Outcome", "Pending", "read"]

Outcome = Literal["ok", "failed", "unknown"]
"""Answered; refused or rolled back for certain; or the connection died and nobody can say."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``number`` is unique in its client; ``end`` is None when the outcome is unknown."""

    client: int
    number: int
    op: str
    tenant: str
    queue: str
    begin: float
    end: float | None = None
    outcome: Outcome = "unknown"
    asked: dict[str, Any] = field(default_factory=dict)
    """Arguments: ``key``, ``partition``, ``txn``, ``due`` (absolute, or None when a delay was asked), ``payload``;
    ``group``, ``lease``, ``up_to``."""
    answer: Any = None
    """A verdict as a mapping (``status``, ``message_id``, ``due``, ``offset``, ``committed``), or the list of a pop."""

    @property
    def ok(self) -> bool:
        """Whether it was answered."""
        return self.outcome == "ok"

    @property
    def status(self) -> str | None:
        """The status of its verdict."""
        return self.answer["status"] if self.ok and isinstance(self.answer, dict) else None

    @property
    def until(self) -> float:
        """When it had taken effect at the latest, if it did."""
        return self.end if self.end is not None else float("inf")

    def __str__(self) -> str:
        what = ", ".join(f"{name}={value!r}" for name, value in self.asked.items() if value is not None)
        said = self.status or self.outcome
        return f"client {self.client} call {self.number}: {self.op}({self.queue!r}, {what}) -> {said}"


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the final log. ``due`` is None when it was pushed."""

    tenant: str
    queue: str
    partition: str
    offset: int
    message_id: str
    txn: str
    payload: Any
    created_at: float
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """A timer that waits at the end."""

    tenant: str
    queue: str
    key: str
    message_id: str
    payload: Any
    due: float


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter at the end; of a timer when its group is ``__timer__``, and then without an offset."""

    tenant: str
    queue: str
    partition: str
    group: str
    offset: int | None
    message_id: str
    payload: Any
    failed_at: float
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """All there was when the load had ended and nothing was due any more."""

    log: list[Message] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)


def _calls(lines: Iterable[str]) -> Iterator[Call]:
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        # A client that was killed may have left half a line, the last one.
        if not line.endswith("\n"):
            continue
        record = json.loads(line)
        last[record["client"], record["number"]] = record
    for record in last.values():
        yield Call(**record)


def read(paths: Iterable[Path]) -> list[Call]:
    """The calls of all clients, by the time they began."""
    calls: list[Call] = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            calls.extend(_calls(file))
    return sorted(calls, key=lambda call: (call.begin, call.client, call.number))
