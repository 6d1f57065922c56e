"""Scheduling: one timer a transaction with several clients, and in batches."""

from __future__ import annotations

import time
from typing import Final

from tests.bench.bench import PAYLOAD, Bench
from tests.bench.figures import Cell, Column, Figure, Result, Table
from tests.support.database import Database

__all__ = ["run"]

_ONE: Final = """\
\\set n :n + 1
\\set seconds random(3600, 36000)
select * from queen.schedule('bench', 'k' || :client_id || '-' || :n, :payload::jsonb, make_interval(secs => :seconds));
"""
# The floor: the same columns and indexes, no function in front.
_FLOOR: Final = """\
\\set n :n + 1
\\set seconds random(3600, 36000)
insert into public.plain (queue, timer_key, deliver_at, txn, message_id, payload, producer_sub)
values ('bench', 'k' || :client_id || '-' || :n, now() + make_interval(secs => :seconds), 't', gen_random_uuid(),
  convert_to(:payload::text, 'UTF8'), session_user);
"""
_PLAIN: Final = "create table public.plain (like queen.log_timers including all)"
_MANY: Final = "select count(*) from queen.schedule_many('bench', %s::text[], %s::jsonb[], delays => %s::interval[])"
_BATCH: Final = 1000


def run(bench: Bench) -> Result:
    """Each number of clients right after the floor with as many."""
    seconds = bench.pick(4, 1)
    rows: list[list[Cell]] = []
    figures = []
    for clients in bench.pick([1, 4, 8], [4]):
        with bench.database() as database:
            database.execute(_PLAIN)
            database.execute("grant insert on public.plain to alice_producer")
            bench.checkpoint()
            floor = bench.run_pgbench(
                database, _FLOOR, clients=clients, seconds=seconds, variables={"payload": PAYLOAD}
            )
            one = bench.run_pgbench(database, _ONE, clients=clients, seconds=seconds, variables={"payload": PAYLOAD})
            assert database.value("select count(*) from queen.log_timers") == one.transactions
        rows.append(
            [
                f"one a transaction, {clients} client{'s' if clients > 1 else ''}",
                one.rate,
                one.p50,
                one.p99,
                floor.rate,
                one.rate / floor.rate,
            ]
        )
        bench.say(f"{clients} clients: {one.rate:,.0f} timers/s, plain insert {floor.rate:,.0f}/s")
        figures.append(Figure(f"schedule, one a transaction, {clients} clients", one.rate, "timers/s"))
    with bench.database() as database:
        bench.checkpoint()
        rate, took = _many(database, bench.pick(100, 5))
    rows.append([f"schedule_many, {_BATCH:,} a transaction, 1 client", rate, took, None, None, None])
    bench.say(f"schedule_many: {rate:,.0f} timers/s")
    figures.append(Figure("schedule_many, 1 client", rate, "timers/s"))
    return Result(
        Table(
            [
                Column("call"),
                Column("timers/s", 0),
                Column("a call: p50 ms", 2),
                Column("p99 ms", 2),
                Column("plain INSERT/s", 0),
                Column("ratio", 2),
            ],
            rows,
        ),
        figures,
    )


def _many(database: Database, batches: int) -> tuple[float, float]:
    connection = database.connect("alice_producer")
    payloads = [PAYLOAD] * _BATCH
    delays = [f"{3600 + 7 * i} seconds" for i in range(_BATCH)]
    took = []
    begin = time.perf_counter()
    for batch in range(batches):
        start = time.perf_counter()
        connection.execute(_MANY, [[f"k{batch}-{i}" for i in range(_BATCH)], payloads, delays], prepare=True)
        took.append(time.perf_counter() - start)
    seconds = time.perf_counter() - begin
    assert database.value("select count(*) from queen.log_timers") == batches * _BATCH
    return batches * _BATCH / seconds, sorted(took)[len(took) // 2] * 1000
