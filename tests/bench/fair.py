"""Tenants beside one another in a backlog, and whether a pass costs by its length."""

from __future__ import annotations

import time
from typing import Final

import psycopg

from tests.bench.bench import PAYLOAD, Bench
from tests.bench.figures import Cell, Column, Figure, Result, Table, median
from tests.support.database import Database
from tests.support.log import FRAMES
from tests.support.sessions import Session

__all__ = ["run"]

_BIG, _SMALL = "a0000000-0000-0000-0000-000000000000", "b0000000-0000-0000-0000-000000000000"
_QUEUES: Final = 10
_BATCH: Final = 10_000
# How many more seconds than its backlog should take a case is given.
_PATIENCE: Final = 60.0


def run(bench: Bench) -> Result:
    """One backend drains tenants' backlogs; what is due is due at one instant."""
    million = bench.pick(1_000_000, 10_000)
    rows: list[list[Cell]] = []
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    waits: list[float] = []
    for turn in range(bench.pick(2, 1)):
        for case in ("alone", "beside"):
            with bench.database() as database:
                bench.say(f"{turn + 1}: scheduling {million:,} timers of one tenant")
                _load(database, million)
                rate, wait = _drain(bench, database, million, other=case == "beside")
                rates[case].append(rate)
                if wait is not None:
                    waits.append(wait)
                bench.say(
                    f"one tenant's {million:,} {case}: {rate:,.0f} timers/s, the other's after {wait or 0:.0f} ms"
                )
    rows.append([f"one tenant's {million:,}", million, median(rates["alone"]), None])
    rows.append(
        [f"one tenant's {million:,}, one of another's due a second later", million, median(rates["beside"]), max(waits)]
    )

    tenants, each = bench.pick(1000, 20), 100
    with bench.database() as database:
        bench.say(f"scheduling {each} timers for each of {tenants:,} tenants")
        first, rate = _many(database, tenants, each)
    bench.say(f"{tenants:,} tenants: the last of them had its first after {first:.0f} ms")
    rows.append([f"{tenants:,} tenants with {each} each", tenants * each, rate, first])

    depths: dict[int, list[float]] = {}
    for count in bench.pick([50_000, 50_000, 50_000, 5_000_000], [2_000, 20_000]):
        with bench.database() as database:
            bench.say(f"scheduling {count:,} timers")
            _load(database, count)
            depths.setdefault(count, []).append(_drain(bench, database, count, at_most=12.0)[0])
        bench.say(f"with {count:,} due: {depths[count][-1]:,.0f} timers/s")
    for count, found in depths.items():
        rows.append([f"{count:,} of one tenant, the first 12 s", count, median(found), None])
    short, deep = map(median, depths.values())
    return Result(
        Table(
            [
                Column("backlog"),
                Column("timers", 0),
                Column("timers/s", 0),
                Column("other tenants: first delivery after ms, max", 0),
            ],
            rows,
        ),
        [
            Figure(
                "backlog of one tenant beside another's timer, rate to alone",
                median(rates["beside"]) / median(rates["alone"]),
                "times",
                at_least=0.8,
            ),
            Figure("the other tenant's timer in that backlog", max(waits), "ms", at_most=1000),
            Figure("many tenants due at once, the last first delivery", first, "ms", at_most=2000),
            Figure("5,000,000 due, rate to 50,000 due", deep / short, "times", at_least=0.9),
        ],
        {"rates": rates, "waits": waits},
    )


def _load(database: Database, count: int) -> None:
    for queue in range(_QUEUES):
        for low in range(0, count // _QUEUES, _BATCH):
            high = min(low + _BATCH, count // _QUEUES)
            database.execute(
                "select count(*) from (select array_agg('k' || i order by i) as keys,"
                " array_agg(%s::jsonb order by i) as payloads from generate_series(%s::int, %s::int) i) a,"
                " lateral queen.schedule_many(%s, a.keys, a.payloads, tenant => %s,"
                " deliver_ats => array_fill('2026-01-01Z'::timestamptz, array[cardinality(a.keys)]))",
                *(PAYLOAD, low + 1, high, f"q{queue}", _BIG),
            )
    database.execute("vacuum analyze queen.log_timers")


def _fired(database: Database, tenant: str) -> int:
    return int(
        database.value(
            "select coalesce(sum(p.last_offset), 0)::bigint from queen.log_partitions p"
            " join queen.queues q on q.id = p.queue_id where q.tenant_id = %s",
            tenant,
        )
    )


def _drain(
    bench: Bench, database: Database, count: int, *, other: bool = False, at_most: float | None = None
) -> tuple[float, float | None]:
    """Timers a second of the large tenant, and the milliseconds that the small one's timer was late."""
    bench.checkpoint()
    session = Session(database)
    try:
        for queue in range(_QUEUES):
            database.value("select queen._provision(%s, %s, 'Default')", _BIG, f"q{queue}")
        session.run("select queen._sweep_begin('0', 0, 1)")
        begin = time.perf_counter()
        call = session.start("call queen.sweep('1 hour', 0, 1)")
        if other:
            database.execute("select queen.schedule('q0', 'one', '1', '1 second', tenant => %s)", _SMALL)
        fired, seconds = 0, 0.0
        while fired < count and seconds < (at_most or count / 10_000 + _PATIENCE):
            assert not call.done(), call.exception()
            time.sleep(0.01)
            fired = _fired(database, _BIG)
            seconds = time.perf_counter() - begin
        wait = None
        if other:
            while _fired(database, _SMALL) == 0:
                time.sleep(0.01)
            wait = float(
                database.value(
                    "select extract(epoch from s.created_at - d.due) * 1000 from queen.log_segments s"
                    " join queen.log_partitions p on p.id = s.partition_id join queen.queues q on q.id = p.queue_id"
                    " cross join lateral (select timestamptz '2000-01-01Z' + u.deliver_at_us * interval '1 us' as due"
                    f"   from {FRAMES}) d where q.tenant_id = %s",
                    _SMALL,
                )
            )
        session.cancel()
        assert isinstance(call.exception(10), psycopg.errors.QueryCanceled)
    finally:
        session.close()
    return fired / seconds, wait


def _many(database: Database, tenants: int, each: int) -> tuple[float, float]:
    """Milliseconds until each of many tenants had its first delivery, and timers a second."""
    due = database.value("select date_trunc('second', clock_timestamp()) + interval '15 s'")
    database.execute(
        "select count(*) from generate_series(1, %s) t, lateral queen.schedule_many('q',"
        " (select array_agg('k' || i) from generate_series(1, %s) i), array_fill('1'::jsonb, array[%s]),"
        " deliver_ats => array_fill(%s::timestamptz, array[%s]),"
        " tenant => ('00000000-0000-0000-0001-' || lpad(t::text, 12, '0'))::uuid)",
        *(tenants, each, each, due, each),
    )
    session = Session(database)
    try:
        session.start("call queen.sweep('1 hour', 0, 1)")
        deadline = time.monotonic() + 15 + _PATIENCE
        while database.value("select coalesce(sum(last_offset), 0) from queen.log_partitions") < tenants * each:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        session.cancel()
    finally:
        session.close()
    count, first, last = database.rows(
        "select count(*), max(f.first), max(f.last) from (select extract(epoch from min(s.created_at) - %s) as first,"
        " extract(epoch from max(s.created_at) - %s) as last from queen.log_segments s"
        " join queen.log_partitions p on p.id = s.partition_id group by p.queue_id) f",
        *(due, due),
    )[0]
    assert count == tenants
    return float(first) * 1000, tenants * each / float(last)
