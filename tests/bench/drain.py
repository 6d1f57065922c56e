"""A backlog of due timers, fired by one and by two backends, in both ways to hold a row."""

from __future__ import annotations

import time
from typing import Final

import psycopg

from tests.bench.bench import Bench, load_timers
from tests.bench.figures import Column, Figure, Result, Table, median
from tests.support.database import Database
from tests.support.sessions import Session

__all__ = ["run"]

_QUEUES: Final = 10
_CASES: Final = [("lock", 1), ("lock", 2), ("lease", 1), ("lease", 2)]
# A case that takes longer is given up after so many seconds, and counts for what it did until then.
_LIMIT: Final = 8.0
_MODES: Final = {"lock": "row locks (the default)", "lease": "leases"}


def run(bench: Bench) -> Result:
    """Drain the same database again and again; cases take turns, so a drift of the machine meets all of them."""
    count = bench.pick(200_000, 5_000)
    rounds = bench.pick(3, 1)
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in _CASES}
    wal: dict[tuple[str, int], list[float]] = {case: [] for case in _CASES}
    with bench.database() as loaded:
        bench.say(f"scheduling {count:,} timers")
        bench.checkpoint()
        # Due at some time of the last ten minutes, in an order that has nothing to do with the order of the rows.
        load_timers(loaded, count, queues=_QUEUES, due="now() - random() * interval '10 minutes'")
        loaded.close()
        for turn in range(rounds):
            for mode, backends in _CASES:
                bench.checkpoint()
                with bench.database(loaded.name) as database:
                    before = bench.wal_position()
                    fired, seconds = _drain(database, mode, backends, count)
                    wal[mode, backends].append((bench.wal_position() - before) / fired)
                rates[mode, backends].append(fired / seconds)
                plural = "s" if backends > 1 else ""
                rate = f"{rates[mode, backends][-1]:,.0f} timers/s"
                bench.say(f"{turn + 1} of {rounds}: {_MODES[mode]}, {backends} backend{plural}: {rate}")
    middle = {case: median(rates[case]) for case in _CASES}
    pairs = {
        mode: median([two / one for one, two in zip(rates[mode, 1], rates[mode, 2], strict=True)]) for mode in _MODES
    }
    modes = median([lease / lock for lease, lock in zip(rates["lease", 1], rates["lock", 1], strict=True)])
    return Result(
        Table(
            [
                Column("rows held by"),
                Column("backends", 0),
                Column("timers/s, median", 0),
                Column("least", 0),
                Column("most", 0),
                Column("ratio to one backend", 2),
                Column("WAL bytes a timer", 0),
            ],
            [
                [
                    _MODES[mode],
                    backends,
                    middle[mode, backends],
                    min(rates[mode, backends]),
                    max(rates[mode, backends]),
                    pairs[mode] if backends == 2 else 1.0,
                    median(wal[mode, backends]),
                ]
                for mode, backends in _CASES
            ],
        ),
        [
            Figure("drain by one backend", middle["lock", 1], "timers/s", at_least=60_000),
            Figure("drain by two backends, ratio to one", pairs["lock"], "times"),
            Figure("drain by one backend with leases, ratio to row locks", modes, "times"),
        ],
        {"timers": count, "rates": {f"{mode} {backends}": rates[mode, backends] for mode, backends in _CASES}},
    )


def _drain(database: Database, mode: str, backends: int, count: int) -> tuple[int, float]:
    """How many timers are in the log after how many seconds: all of them, or what time allows."""
    database.value("select queen.configure('sweep_mode', %s)", mode)
    assert database.value("select count(*) from queen.log_partitions") == 0
    sessions = [Session(database) for _ in range(backends)]
    try:
        # The queues are born, the plans and the server's Python are there, as in a worker that has been up for a while.
        for queue in range(_QUEUES):
            database.value(
                "select queen._provision('00000000-0000-0000-0000-000000000001', %s, 'Default')", f"q{queue}"
            )
        for session in sessions:
            session.run("select queen._sweep_begin('0', 0, 1)")
        begin = time.perf_counter()
        calls = [
            session.start(f"call queen.sweep('1 hour', {worker}, {backends})")
            for worker, session in enumerate(sessions)
        ]
        fired, seconds = 0, 0.0
        while fired < count and seconds < _LIMIT:
            assert not any(call.done() for call in calls), [call.exception() for call in calls if call.done()]
            time.sleep(0.002)
            fired = database.value("select sum(last_offset)::bigint from queen.log_partitions")
            seconds = time.perf_counter() - begin
        for session, call in zip(sessions, calls, strict=True):
            session.cancel()
            assert isinstance(call.exception(10), psycopg.errors.QueryCanceled)
    finally:
        for session in sessions:
            session.close()
    logged = database.value("select sum(last_offset)::bigint from queen.log_partitions")
    left = database.value("select count(*) from queen.log_timers")
    assert logged + left == count, (logged, left)
    return fired, seconds
