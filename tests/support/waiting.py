"""Waiting for a state instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.support.database import Database

__all__ = ["wait_for", "wait_until_blocked"]

T = TypeVar("T")


def wait_for(state: Callable[[], T], timeout: float = 10.0, *, what: str = "") -> T:
    """Call `state` until its answer is true and return that; AssertionError with the last answer after `timeout`."""
    deadline = time.monotonic() + timeout
    while True:
        answer = state()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or state!r}; last answer {answer!r}")
        time.sleep(0.005)


def wait_until_blocked(database: Database, pid: int, timeout: float = 10.0) -> None:
    """Wait until the backend `pid` waits for a heavyweight lock."""
    wait_for(
        lambda: database.rows("select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'", pid),
        timeout,
        what=f"backend {pid} waits for a lock",
    )
