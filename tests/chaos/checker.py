"""The judge of a chaos run: reads histories and what was left at the end, and knows nothing of the implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from typing import Final as Constant

from . import log_rules, timer_rules
from .run import Run

__all__ = ["RULES", "Run", "Violation", "counts", "judge"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold, and where."""

    rule: str
    what: str


RULES: Constant[dict[str, Callable[[Run], Iterator[str]]]] = {
    "something is delivered": timer_rules.delivers,
    "once": timer_rules.once,
    "nothing that nobody sent": timer_rules.sent_by_somebody,
    "nothing after a failure": timer_rules.not_after_failure,
    "nothing after a cancel": timer_rules.not_after_cancel,
    "nothing after a replacement": timer_rules.not_after_replacement,
    "nothing lost": timer_rules.nothing_lost,
    "never early": timer_rules.not_early,
    "the books balance": timer_rules.books,
    "absent is true": timer_rules.absent_is_true,
    "due order": timer_rules.due_order,
    "the log is whole": log_rules.log_is_whole,
    "consumed once acknowledged": log_rules.consumed,
    "letters carry their payload": log_rules.letters_are_whole,
}
"""Every rule by its name; each yields what breaks it."""


def judge(run: Run, most: int = 20) -> list[Violation]:
    """What breaks a rule, up to ``most`` of each."""
    found: list[Violation] = []
    for rule, check in RULES.items():
        for _, what in zip(range(most), check(run), strict=False):
            found.append(Violation(rule, what))
    return found


def counts(run: Run) -> dict[str, Any]:
    """The figures of a summary: what was asked, what arrived, and how many broke the promise in each way."""
    found = Counter(violation.rule for violation in judge(run, most=1_000_000))
    return {
        "calls": dict(Counter(f"{c.op} {c.status or c.outcome}" for c in run.calls)),
        "arrived": len(run.final.log),
        "pending": len(run.final.pending),
        "dead": len(run.final.letters),
        "lost": found["nothing lost"],
        "twice": found["once"],
        "early": found["never early"],
        "after cancel": found["nothing after a cancel"],
        "broken rules": dict(found),
    }
