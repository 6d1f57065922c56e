"""Whether some order of the calls on one key explains their answers, what was delivered, and what is left.

Each call takes effect at one moment between its begin and its end (linearizability, Herlihy and Wing 1990); one whose
outcome is unknown at any moment after its begin, or never. Delivery and death of a timer are such moments too. The
search is that of Wing and Gong (1993) with the memory of Lowe (2017): a set of what has happened, and the state it led
to, are tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final as Constant
from typing import TypeAlias

from .history import Call

__all__ = ["Death", "explain"]

State: TypeAlias = "tuple[str, float | None] | None"
"""What waits under the key: the version's mark and its time (None: not known); or nothing."""
_Step: TypeAlias = "Callable[[State], list[State]]"
_MOST: Constant = 2_000_000


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a life that is no call: the timer came into the log, or among the dead letters."""

    mark: str
    due: float | None
    at: float
    margin: float


@dataclass(frozen=True, slots=True)
class _Event:
    begin: float
    end: float
    must: bool
    step: _Step


def _same(a: float | None, b: float | None) -> bool:
    # Microseconds of PostgreSQL, through a double.
    return a is None or b is None or abs(a - b) < 2e-6


def _call(call: Call, marks: dict[str, str]) -> _Event | None:
    """The call as an event; ``marks`` gives the version's mark by message id."""
    status = call.status
    due = call.answer.get("due") if call.ok and call.answer.get("due") is not None else call.asked.get("due")
    named = marks.get(str(call.answer.get("message_id"))) if call.ok else None

    def step(state: State) -> list[State]:
        if status == "absent":
            return [state] if state is None else []
        if status == "too_late":
            return [state] if state is not None else []
        if call.op == "schedule":
            if (status == "scheduled" and state is not None) or (status == "rescheduled" and state is None):
                return []
            return [(call.asked["payload"]["v"], due)]
        if state is None:
            # Unknown, and nothing was there: it changed nothing, as if it had never been.
            return []
        if named is not None and named != state[0]:
            return []
        return [None] if call.op == "cancel" else [(state[0], due)]

    if call.outcome == "failed":
        return None
    return _Event(call.begin, call.until, call.ok, step)


def _death(death: Death) -> _Event:
    def step(state: State) -> list[State]:
        return [None] if state is not None and state[0] == death.mark and _same(state[1], death.due) else []

    return _Event(death.at - death.margin, death.at + death.margin, True, step)


def explain(
    calls: Sequence[Call], deaths: Sequence[Death], left: tuple[str, float] | None, marks: dict[str, str]
) -> bool | None:
    """Whether an order exists that ends with ``left`` waiting; None when the search was given up.

    ``marks`` are the marks of versions by the message ids that answers named.
    """
    events = [event for call in calls if (event := _call(call, marks)) is not None] + [_death(d) for d in deaths]
    events.sort(key=lambda event: event.begin)
    required = sum(1 << i for i, event in enumerate(events) if event.must)
    seen: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, None)]
    while stack:
        done, state = stack.pop()
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > _MOST:
            return None
        if done & required == required and (
            state is None if left is None else state is not None and state[0] == left[0] and _same(state[1], left[1])
        ):
            return True
        # Nothing may come after what ended before it began.
        latest = min((e.end for i, e in enumerate(events) if e.must and not done >> i & 1), default=float("inf"))
        for i, event in enumerate(events):
            if event.begin > latest:
                break
            if not done >> i & 1:
                stack.extend((done | 1 << i, after) for after in event.step(state))
    return False
