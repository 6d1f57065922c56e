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
# How rows are held, by how many backends, and in which order the timers are due: that of their rows, as when all are
# scheduled with the same delay, or none that has to do with it, so that each row lies on another page.
_CASES: Final = [
    ("lock", 1, "as scheduled"),
    ("lock", 2, "as scheduled"),
    ("lock", 1, "at random"),
    ("lease", 1, "as scheduled"),
    ("lease", 2, "as scheduled"),
]
_DUE: Final = {
    "as scheduled": "now() - interval '10 minutes' + i * interval '1 millisecond'",
    "at random": "now() - random() * interval '10 minutes'",
}
# A case that takes longer is given up after so many seconds, and counts for what it did until then.
_LIMIT: Final = 8.0
_MODES: Final = {"lock": "row locks (the default)", "lease": "leases"}


def run(bench: Bench) -> Result:
    """Drain the same database again and again; cases take turns, so a drift of the machine meets all of them."""
    count = bench.pick(200_000, 5_000)
    rounds = bench.pick(3, 1)
    rates: dict[tuple[str, int, str], list[float]] = {case: [] for case in _CASES}
    wal: dict[tuple[str, int, str], list[float]] = {case: [] for case in _CASES}
    with bench.database() as in_order, bench.database() as at_random:
        bench.say(f"scheduling {count:,} timers, twice")
        loaded = {"as scheduled": in_order, "at random": at_random}
        for order, database in loaded.items():
            load_timers(database, count, queues=_QUEUES, due=_DUE[order])
            database.close()
        for turn in range(rounds):
            for case in _CASES:
                mode, backends, order = case
                bench.checkpoint()
                with bench.database(loaded[order].name) as database:
                    before = bench.wal_position()
                    fired, seconds = _drain(database, mode, backends, count)
                    wal[case].append((bench.wal_position() - before) / fired)
                rates[case].append(fired / seconds)
                plural = "s" if backends > 1 else ""
                rate = f"{rates[case][-1]:,.0f} timers/s"
                bench.say(f"{turn + 1} of {rounds}: {_MODES[mode]}, {backends} backend{plural}, due {order}: {rate}")
    middle = {case: median(rates[case]) for case in _CASES}
    base = rates["lock", 1, "as scheduled"]
    ratios = {case: median([other / one for one, other in zip(base, rates[case], strict=True)]) for case in _CASES}
    return Result(
        Table(
            [
                Column("rows held by"),
                Column("backends", 0),
                Column("due"),
                Column("timers/s, median", 0),
                Column("least", 0),
                Column("most", 0),
                Column("ratio to the first", 2),
                Column("WAL bytes a timer", 0),
            ],
            [
                [
                    _MODES[case[0]],
                    case[1],
                    case[2],
                    middle[case],
                    min(rates[case]),
                    max(rates[case]),
                    ratios[case],
                    median(wal[case]),
                ]
                for case in _CASES
            ],
        ),
        [
            Figure("drain by one backend", middle["lock", 1, "as scheduled"], "timers/s", at_least=60_000),
            Figure("drain by two backends, ratio to one", ratios["lock", 2, "as scheduled"], "times"),
            Figure("drain by one backend, due at random, ratio", ratios["lock", 1, "at random"], "times"),
            Figure("drain by one backend with leases, ratio to row locks", ratios["lease", 1, "as scheduled"], "times"),
        ],
        {"timers": count, "rates": {" ".join(map(str, case)): rates[case] for case in _CASES}},
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
