"""Lateness under a steady stream of timers, while pg_cron's two workers fire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from tests.bench.bench import PAYLOAD, Bench, Pgbench, cpu_seconds, lateness
from tests.bench.figures import Cell, Column, Figure, Result, Table, quantiles
from tests.support.database import Database
from tests.support.waiting import wait_for

__all__ = ["run"]

_SCRIPT: Final = """\
\\set n :n + 1
\\set queue random(0, 9)
select * from queen.schedule(
  :name::text || :queue, 'k' || :client_id || '-' || :n, :payload::jsonb, interval '200 milliseconds');
"""


def run(bench: Bench) -> Result:
    """Four clients schedule one timer a transaction at a set rate, due 200 ms ahead, over ten queues."""
    database = bench.cron_database()
    seconds = bench.pick(15, 2)
    rows: list[list[Cell]] = []
    figures = []
    details = {}
    _stream(bench, database, 500, bench.pick(3, 1), "warm-")
    for rate in bench.pick([1000, 4000], [1000]):
        bench.say(f"{rate:,} timers/s for {seconds} s")
        done, processors = _stream(bench, database, rate, seconds, f"steady-{rate}-")
        late = [late for queue in range(10) for late in lateness(database, f"steady-{rate}-{queue}")]
        assert len(late) == done.transactions, (len(late), done)
        assert min(late) >= 0
        p50, p99, most = quantiles(late)
        bench.say(f"{rate:,} timers/s: p50 {p50:.1f}, p99 {p99:.1f}, max {most:.1f} ms")
        rows.append([rate, done.rate, len(late), p50, p99, most, done.p50, done.p99, processors])
        figures += [
            Figure(f"steady {rate:,} timers/s, p50", p50, "ms"),
            Figure(f"steady {rate:,} timers/s, p99", p99, "ms"),
            Figure(f"steady {rate:,} timers/s, max", most, "ms"),
        ]
        details[str(rate)] = {"reached": done.rate}
    return Result(
        Table(
            [
                Column("timers/s wanted", 0),
                Column("scheduled/s", 0),
                Column("timers", 0),
                Column("lateness: p50 ms", 1),
                Column("p99", 1),
                Column("max", 1),
                Column("schedule: p50 ms", 2),
                Column("p99", 2),
                Column("cores used by the workers", 2),
            ],
            rows,
        ),
        figures,
        details,
    )


def _stream(bench: Bench, database: Database, rate: int, seconds: float, name: str) -> tuple[Pgbench, float]:
    """What pgbench reached, and how many cores the workers kept busy meanwhile."""
    variables = {"payload": PAYLOAD, "name": name}
    with bench.pgbench(database, _SCRIPT, clients=4, seconds=seconds, rate=rate, variables=variables) as finish:
        begin = time.perf_counter()
        busy = sum(_busy(bench, begin + seconds))
        took = time.perf_counter() - begin
        done = finish()
    wait_for(lambda: database.value("select count(*) from queen.log_timers") == 0, 60, what="all timers are fired")
    return done, busy / took


def _busy(bench: Bench, until: float) -> Iterator[float]:
    """Seconds of processor time of the workers, whoever they are from one half second to the next."""
    before = cpu_seconds(bench.sweepers())
    while time.perf_counter() < until:
        time.sleep(0.5)
        after = cpu_seconds(bench.sweepers())
        yield sum(used - before.get(pid, 0.0) for pid, used in after.items())
        before = after
