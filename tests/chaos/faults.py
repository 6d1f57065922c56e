"""Faults, each done to a running server or its clients; processes are ended by the ids of those the run started."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import psycopg

from tests.support.clock import Clock
from tests.support.database import Database
from tests.support.waiting import wait_for

__all__ = ["CRASHES", "FAULTS", "Stage"]


@dataclass
class Stage:
    """What faults act on."""

    database: Database
    dice: random.Random
    kill_client: Callable[[], None]
    accepting: list[float] = field(default_factory=list)
    """When the server took connections again after a crash, by the clock."""

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """A superuser's connection for one fault."""
        return psycopg.connect(self.database.conninfo(), autocommit=True, connect_timeout=5)

    def came_back(self) -> None:
        """Wait until the server takes connections, and remember when it did."""

        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError), self.connect():
                return True
            return False

        wait_for(answers, 60, what="the server takes connections")
        self.accepting.append(time.time())


def _children(pid: int) -> list[int]:
    """Processes whose parent this is."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]


def _signal(pids: list[int], what: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def _kill_server(stage: Stage) -> None:
    """SIGKILL of the postmaster and all its children, and a start."""
    cluster = stage.database.cluster
    pid = cluster.pid
    assert pid is not None
    children = _children(pid)
    _signal([pid, *children], signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in [pid, *children]), 30, what="they are gone")
    cluster.start()
    stage.came_back()


def _immediate_shutdown(stage: Stage) -> None:
    stage.database.cluster.restart("immediate")
    stage.came_back()


def _backends(stage: Stage, which: str) -> list[int]:
    with stage.connect() as connection:
        rows = connection.execute(
            "select pid from pg_stat_activity where pid <> pg_backend_pid() and datname = current_database()"
            f" and {which}"
        ).fetchall()
    return [int(str(pid)) for (pid,) in rows]


_SWEEPERS: Final = "query ilike 'call queen.sweep%%'"
_CLIENTS: Final = "usename = 'chaos_client'"


def _kill_backend(which: str) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        if pids := _backends(stage, which):
            # The postmaster takes all others down with it and recovers.
            _signal([stage.dice.choice(pids)], signal.SIGKILL)
            time.sleep(0.1)
            stage.came_back()

    return fault


def _tell_backend(function: str, which: str) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        for pid in _backends(stage, which):
            with stage.connect() as connection:
                connection.execute(f"select {function}(%s)", [pid])

    return fault


def _terminate_launcher(stage: Stage) -> None:
    with stage.connect() as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'pg_cron launcher'"
        )


def _freeze_server(stage: Stage) -> None:
    """SIGSTOP for seconds, in which timers come due."""
    pid = stage.database.cluster.pid
    assert pid is not None
    frozen = [pid, *_children(pid)]
    _signal(frozen, signal.SIGSTOP)
    try:
        time.sleep(stage.dice.uniform(1, 3))
    finally:
        _signal(frozen, signal.SIGCONT)


def _setting(name: str, value: str) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        with stage.connect() as connection:
            connection.execute(f"alter system set {name} = '{value}'")
            connection.execute("select pg_reload_conf()")
            time.sleep(stage.dice.uniform(1, 3))
            connection.execute(f"alter system reset {name}")
            connection.execute("select pg_reload_conf()")

    return fault


def _held_snapshot(stage: Stage) -> None:
    with stage.connect() as connection:
        connection.execute("begin isolation level repeatable read")
        connection.execute("select count(*) from queen.log_timers")
        time.sleep(stage.dice.uniform(1, 5))
        connection.execute("rollback")


def _in_transaction(*statements: str) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        with stage.connect() as connection:
            connection.execute("set lock_timeout = '3 s'")
            with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
                for statement in statements:
                    connection.execute(statement)
                time.sleep(stage.dice.uniform(0.2, 1.5))

    return fault


def _no_connection_left(stage: Stage) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(psycopg.OperationalError):
            for _ in range(200):
                stack.enter_context(psycopg.connect(stage.database.conninfo("chaos_client"), connect_timeout=2))
        time.sleep(stage.dice.uniform(0.5, 2))


def _disk_full(stage: Stage) -> None:
    """The data directory's file system, a small one of its own, filled to the last block for a while."""
    ballast = stage.database.cluster.data.parent / "ballast"
    try:
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        time.sleep(stage.dice.uniform(0.5, 2))
    finally:
        ballast.unlink(missing_ok=True)
    # PostgreSQL panics when it cannot write its WAL, and recovers.
    if stage.database.cluster.pid is None:
        stage.database.cluster.start()
    stage.came_back()


def _step_clock(stage: Stage) -> None:
    """The time function jumps by up to a second, back or forth, for a moment."""
    database = Database(stage.database.cluster, stage.database.name)
    try:
        clock = Clock(database)
        clock.advance(timedelta(seconds=stage.dice.uniform(-1, 1)))
        clock.run()
        time.sleep(stage.dice.uniform(0.2, 1))
        clock.reset()
    finally:
        database.close()


def _kill_client(stage: Stage) -> None:
    stage.kill_client()


CRASHES: Final[dict[str, Callable[[Stage], None]]] = {
    "kill -9 of the server": _kill_server,
    "immediate shutdown": _immediate_shutdown,
    "kill -9 of a sweeper": _kill_backend(_SWEEPERS),
    "kill -9 of a client's backend": _kill_backend(_CLIENTS),
}
"""Faults after which the server recovers."""

FAULTS: Final[dict[str, Callable[[Stage], None]]] = {
    **CRASHES,
    "sweepers terminated": _tell_backend("pg_terminate_backend", _SWEEPERS),
    "sweepers cancelled": _tell_backend("pg_cancel_backend", _SWEEPERS),
    "clients terminated": _tell_backend("pg_terminate_backend", _CLIENTS),
    "clients cancelled": _tell_backend("pg_cancel_backend", _CLIENTS),
    "kill -9 of a client": _kill_client,
    "pg_cron's launcher terminated": _terminate_launcher,
    "SIGSTOP of the server": _freeze_server,
    "lock_timeout low": _setting("lock_timeout", "20ms"),
    "statement_timeout low": _setting("statement_timeout", "100ms"),
    "deadlock_timeout low": _setting("deadlock_timeout", "1ms"),
    "snapshot held": _held_snapshot,
    "timers locked by an operator": _in_transaction("lock table queen.log_timers in access exclusive mode"),
    "segments locked by an operator": _in_transaction("lock table queen.log_segments in access exclusive mode"),
    "tables altered": _in_transaction(
        "alter table queen.log_timers set (fillfactor = 60)",
        "alter table queen.log_timers set (fillfactor = 70)",
    ),
    "no connection left": _no_connection_left,
    "disk full": _disk_full,
    "clock stepped": _step_clock,
}
"""Every fault by its name."""
